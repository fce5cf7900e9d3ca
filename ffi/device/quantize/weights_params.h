// Arguments of the kernel that quantizes matrices in blocks of 128 x 128.
#ifndef JAX_EP_DEVICE_QUANTIZE_WEIGHTS_PARAMS_H_
#define JAX_EP_DEVICE_QUANTIZE_WEIGHTS_PARAMS_H_

#include "ffi/device/quantize/scale_params.h"

namespace jax_ep {

// Values and scales of matrices in one layout. Without values it is not written.
struct QuantizedMatrices {
  uint8_t* values = nullptr;
  float* scales = nullptr;
  int64_t value_stride = 0;         // bytes from row to row
  int64_t scale_stride = 0;         // floats from row to row of blocks
  int64_t matrix_value_stride = 0;  // bytes from matrix to matrix
  int64_t matrix_scale_stride = 0;  // floats from matrix to matrix
};

struct QuantizeWeightsParams {
  const void* x;  // [matrices, rows, columns]
  QuantizedMatrices as_given;
  QuantizedMatrices transposed;
  int32_t rows;
  int32_t columns;
  int32_t row_blocks;
  int32_t column_blocks;
  ScaleParams scale;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_QUANTIZE_WEIGHTS_PARAMS_H_
