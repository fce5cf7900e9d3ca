// Launches grouped_matmul and grouped_matmul_rhs_gradient.
#ifndef JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_H_
#define JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/runtime/calls/config.h"
#include "ffi/runtime/calls/signatures.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// Check whether the kernels support a call. Called when XLA compiles it, and by the launches.
Status CheckGroupedMatmulLaunch(const GroupedMatmulConfig& config, const GroupedMatmulSizes& sizes);
Status CheckGroupedMatmulRhsGradientLaunch(const GroupedMatmulConfig& config,
                                           const GroupedMatmulSizes& sizes);

// Computes out[rows of group g] = lhs[rows of group g] * rhs[g], in one kernel on `stream`.
//
// Pointers are to memory of the current device. Only the kernel reads group_sizes, so the launch
// can be captured. It reads negative sizes as 0 and clips the groups at num_rows. Rows past the
// last group are not accessed, except for the zeros that config.zero_tail writes to out.
//
// lhs is bfloat16, float16 or float32; rhs and out have its type or float32. Accumulators are
// float32. tile_counter comes from TileCounter (tile_counter.h).
Status LaunchGroupedMatmul(const GroupedMatmulConfig& config, const GroupedMatmulSizes& sizes,
                           const void* lhs, const void* rhs, const int32_t* group_sizes, void* out,
                           int32_t tile_counter, cudaStream_t stream);

// Computes rhs_gradient[g] = transpose(lhs[rows of group g]) * out_gradient[rows of group g], or
// its transpose if config.transpose_rhs. Groups without rows get zeros. Otherwise like
// LaunchGroupedMatmul.
//
// If config.has_accumulator, rhs_gradient holds float32 numbers, and the products are added to
// them. Groups without rows keep theirs.
Status LaunchGroupedMatmulRhsGradient(const GroupedMatmulConfig& config,
                                      const GroupedMatmulSizes& sizes, const void* lhs,
                                      const void* out_gradient, const int32_t* group_sizes,
                                      void* rhs_gradient, int32_t tile_counter,
                                      cudaStream_t stream);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_H_
