// Arguments of the kernels of quantized rows.
#ifndef JAX_EP_DEVICE_QUANTIZE_PARAMS_H_
#define JAX_EP_DEVICE_QUANTIZE_PARAMS_H_

#include "ffi/device/quantize/scale_params.h"

namespace jax_ep {

struct QuantizeParams {
  const void* x;    // [rows, columns]
  uint8_t* values;  // [rows, columns]
  float* scales;    // [rows, scales per row]
  int32_t columns;
  ScaleParams scale;
  bool is_aligned;  // rows begin at multiples of a vector, and their values likewise
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_QUANTIZE_PARAMS_H_
