// Launches grouped matmuls and the gradient of their right operand.
#ifndef JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_H_
#define JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/runtime/config.h"
#include "ffi/runtime/signatures.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// Whether the kernels take a call. To be asked when it is compiled; the launches ask again.
Status CheckGroupedMatmulLaunch(const GroupedMatmulConfig& config, const GroupedMatmulSizes& sizes);
Status CheckGroupedMatmulRhsGradientLaunch(const GroupedMatmulConfig& config,
                                           const GroupedMatmulSizes& sizes);

// out[rows of group g] = lhs[rows of group g] * rhs[g], in one kernel on `stream`. Addresses are of
// the current device; group_sizes is read by the kernel alone, so a launch can be captured.
// Negative sizes count as 0 and sums past num_rows as num_rows. Neither lhs nor out is accessed
// past the last group, but for the zeros that config.zero_tail writes to out.
//
// bfloat16, float16 or float32; rhs and out may be float32 where lhs is not. Sums are float32.
Status LaunchGroupedMatmul(const GroupedMatmulConfig& config, const GroupedMatmulSizes& sizes,
                           const void* lhs, const void* rhs, const int32_t* group_sizes, void* out,
                           int32_t tile_counter, cudaStream_t stream);

// rhs_gradient[g] = transpose(lhs[rows of group g]) * out_gradient[rows of group g], transposed if
// config.transpose_rhs; zeros for a group without rows. The rest is as above.
Status LaunchGroupedMatmulRhsGradient(const GroupedMatmulConfig& config,
                                      const GroupedMatmulSizes& sizes, const void* lhs,
                                      const void* out_gradient, const int32_t* group_sizes,
                                      void* rhs_gradient, int32_t tile_counter,
                                      cudaStream_t stream);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_H_
