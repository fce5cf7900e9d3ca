// Launches the grouped matmul of bfloat16 rows and MXFP4 weights.
#ifndef JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_MXFP4_H_
#define JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_MXFP4_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/runtime/calls/config.h"
#include "ffi/runtime/calls/signatures.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

struct MxFp4Matmul {
  const void* lhs;            // bfloat16[M, K]
  const void* rhs;            // E2M1[L, N, K], two per byte, the first in the low bits
  const uint8_t* rhs_scales;  // E8M0[L, N, K / 32]
  const int32_t* group_sizes;
  void* out;  // [M, N], bfloat16 or float32
  bool zero_tail = true;
  int64_t num_sms = 0;  // 0: all
};

// Describes what follows the matmul: as in grouped_matmul_activation.h, with limits.
struct MxFp4Activation {
  Activation activation;  // none, or a gated one
  float limit;            // see GroupedMatmulMxFp4ActivationConfig
  float alpha;
  const float* bias;         // [L, N], or null
  const float* row_weights;  // [M], or null
  void* pre_activation;      // bfloat16[M, N], or null
};

// Checks whether the kernel supports a call. Called when XLA compiles it, and by the launch.
Status CheckGroupedMatmulMxFp4Launch(int64_t num_sms, const GroupedMatmulSizes& sizes);

// Computes out[rows of group g] = lhs[rows of group g] * transpose(rhs[g]), values times scales, in
// one kernel on `stream`. Weights are exact in bfloat16, and sums are in float32. tile_counter and
// groups are those of LaunchGroupedMatmul. The device's compute capability is 9.0.
Status LaunchGroupedMatmulMxFp4(const MxFp4Matmul& call, const GroupedMatmulSizes& sizes,
                                int32_t tile_counter, cudaStream_t stream);

// The same for the gradient of the rows. sizes.contracted is N, and sizes.columns K.
Status CheckGroupedMatmulMxFp4LhsGradientLaunch(int64_t num_sms, const GroupedMatmulSizes& sizes);

// Computes out[rows of group g] = lhs[rows of group g] * rhs[g]: lhs is bfloat16[M, N], and out is
// [M, K].
Status LaunchGroupedMatmulMxFp4LhsGradient(const MxFp4Matmul& call, const GroupedMatmulSizes& sizes,
                                           int32_t tile_counter, cudaStream_t stream);

// The same for the activation. `sizes.columns` is F, the columns of the result.
Status CheckGroupedMatmulMxFp4ActivationLaunch(const GroupedMatmulMxFp4ActivationConfig& config,
                                               const GroupedMatmulSizes& sizes);

// Computes what LaunchGroupedMatmulActivation does, with limits of gate and up. rhs is [L, N, K]:
// the columns of a gate, if there is one, then those of up. The tail is not written.
Status LaunchGroupedMatmulMxFp4Activation(const MxFp4Matmul& call,
                                          const MxFp4Activation& activation,
                                          const GroupedMatmulSizes& sizes, int32_t tile_counter,
                                          cudaStream_t stream);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_MXFP4_H_
