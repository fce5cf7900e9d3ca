// Launches the kernel that quantizes matrices in blocks of 128 x 128.
#ifndef JAX_EP_KERNELS_QUANTIZE_QUANTIZE_WEIGHTS_H_
#define JAX_EP_KERNELS_QUANTIZE_QUANTIZE_WEIGHTS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/device/quantize/weights_params.h"
#include "ffi/runtime/calls/buffers.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

struct QuantizeWeights {
  ElementType type = kOther;  // x's
  int64_t num_matrices = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  float min_amax = 0;
  bool power_of_two_scales = false;
  const void* x = nullptr;
};

// Arrays of a layout. Without values it is not written.
struct LayoutArrays {
  uint8_t* values = nullptr;
  float* scales = nullptr;
};

// The layouts of results. Columns of x go to those of a wider matrix from `first_column` on, a
// multiple of 128.
struct WeightLayouts {
  LayoutArrays as_given = {};    // [matrices, rows, total_columns]
  LayoutArrays transposed = {};  // [matrices, total_columns, rows]
  int64_t total_columns = 0;
  int64_t first_column = 0;
};

// Loads the kernels on the current device, see LoadMatmulKernels.
Status LoadQuantizeWeightsKernels();

// Checks whether the kernels support the sizes. Called when XLA compiles a call, and by the launch.
Status CheckQuantizeWeightsLaunch(int64_t num_matrices, int64_t rows, int64_t columns);

// Quantizes on `stream`.
Status LaunchQuantizeWeights(const QuantizeWeights& call, const WeightLayouts& layouts,
                             cudaStream_t stream);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_QUANTIZE_QUANTIZE_WEIGHTS_H_
