// Arguments of the kernel that quantizes the rows of groups, transposed.
#ifndef JAX_EP_DEVICE_QUANTIZE_TRANSPOSED_PARAMS_H_
#define JAX_EP_DEVICE_QUANTIZE_TRANSPOSED_PARAMS_H_

#include "ffi/device/quantize/scale_params.h"

namespace jax_ep {

// A row block is up to 128 rows of one group. Rows that it lacks are zeros.
struct QuantizeTransposedParams {
  const void* x;              // [rows, columns]
  const float* x_scales;      // [rows, x_scales_per_row] if x has E4M3 values
  int32_t x_scales_per_row;   // one per 128 columns, or 1
  const int32_t* first_rows;  // [row blocks]
  const int32_t* num_rows;    // [row blocks]; 0 past the last group
  uint8_t* values;            // [row blocks, columns, 128]
  float* scales;              // [row blocks, columns], or [row blocks, column blocks]
  int32_t rows;
  int32_t columns;
  int32_t column_blocks;
  ScaleParams scale;
  bool zero_tail;       // writes zeros, with scales of their own, past the last group
  uint8_t* row_values;  // [rows, columns], if rows are quantized as they are, too
  float* row_scales;    // [rows, column blocks]
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_QUANTIZE_TRANSPOSED_PARAMS_H_
