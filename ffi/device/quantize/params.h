// Arguments of the kernels of quantized rows.
#ifndef JAX_EP_DEVICE_QUANTIZE_PARAMS_H_
#define JAX_EP_DEVICE_QUANTIZE_PARAMS_H_

#include "ffi/device/quantize/scale_params.h"

namespace jax_ep {

// Values and scales of rows, in arrays of their own or packed: each row's values, then its scales.
struct QuantizedRows {
  uint8_t* values;
  float* scales;
  int64_t value_stride;       // bytes from row to row
  int64_t scale_stride;       // floats from row to row
  int32_t value_padding = 0;  // bytes of zeros that follow a row's values
  int32_t scale_padding = 0;  // floats of zeros that follow a row's scales
};

struct QuantizeParams {
  const void* x;  // [rows, columns]
  QuantizedRows out;
  int32_t columns;
  ScaleParams scale;
  bool is_aligned;  // rows begin at multiples of a vector, and their values likewise
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_QUANTIZE_PARAMS_H_
