// Launches the kernel that quantizes the rows of groups, transposed.
#ifndef JAX_EP_KERNELS_QUANTIZE_QUANTIZE_TRANSPOSED_H_
#define JAX_EP_KERNELS_QUANTIZE_QUANTIZE_TRANSPOSED_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/runtime/calls/buffers.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// A row block is up to 128 rows of one group, see QuantizeTransposedParams.
struct QuantizeTransposed {
  ElementType type = kOther;  // x's
  int64_t num_rows = 0;
  int64_t columns = 0;
  int64_t row_blocks = 0;
  bool per_column = false;  // a scale per column of a row block; else one per 128 columns
  bool zero_tail = false;   // also writes the row blocks without rows
  float min_amax = 0;
  bool power_of_two_scales = false;
  const void* x = nullptr;              // [num_rows, columns]
  const float* x_scales = nullptr;      // [num_rows, x_scales_per_row] of E4M3 values
  int64_t x_scales_per_row = 0;         // one per 128 columns, or 1
  const int32_t* first_rows = nullptr;  // [row_blocks]
  const int32_t* block_rows = nullptr;  // [row_blocks]
  uint8_t* values = nullptr;            // [row_blocks, columns, 128]
  float* scales = nullptr;              // [row_blocks, columns], or [row_blocks, columns / 128]
  // The rows of groups as they are, with a scale per row and 128 columns. Null: they are not
  // written.
  uint8_t* row_values = nullptr;  // [num_rows, columns]
  float* row_scales = nullptr;    // [num_rows, columns / 128]
};

// Loads the kernels on the current device, see LoadMatmulKernels.
Status LoadQuantizeTransposedKernels();

// Checks whether the kernels support the sizes. Called when XLA compiles a call, and by the launch.
Status CheckQuantizeTransposedLaunch(int64_t num_rows, int64_t columns, int64_t row_blocks);

// Quantizes on `stream`.
Status LaunchQuantizeTransposed(const QuantizeTransposed& call, cudaStream_t stream);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_QUANTIZE_QUANTIZE_TRANSPOSED_H_
