// Launches the weight gradient of a grouped matmul of 8-bit operands.
#ifndef JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_FP8_RHS_GRADIENT_H_
#define JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_FP8_RHS_GRADIENT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/runtime/calls/config.h"
#include "ffi/runtime/calls/signatures.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// Both operands are E4M3 and in row blocks of 128, as quantize_transposed writes them.
struct Fp8RhsGradient {
  const void* a;               // [B, K, 128]
  const float* a_scales;       // [B, K]
  const void* b;               // [B, N, 128]
  const float* b_scales;       // [B, ceil(N / 128)]
  const int32_t* group_sizes;  // [L]: rows of each group's row blocks, multiples of 128
  void* rhs_gradient;          // [L, K, N], bfloat16 or float32
};

// Checks whether the kernels support a call. Called when XLA compiles it, and by the launch.
Status CheckGroupedMatmulFp8RhsGradientLaunch(const GroupedMatmulQuantizedRhsGradientConfig& config,
                                              const GroupedMatmulSizes& sizes);

// Computes rhs_gradient[g] = sum over the group's row blocks of a * transpose(b), values times
// scales, in one kernel on `stream`. sizes.num_rows is 128 * B. Otherwise it is like
// LaunchGroupedMatmulRhsGradient. The device's compute capability is 9.0.
Status LaunchGroupedMatmulFp8RhsGradient(const GroupedMatmulQuantizedRhsGradientConfig& config,
                                         const Fp8RhsGradient& call,
                                         const GroupedMatmulSizes& sizes, int32_t tile_counter,
                                         cudaStream_t stream);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_FP8_RHS_GRADIENT_H_
