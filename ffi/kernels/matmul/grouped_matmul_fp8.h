// Launches the grouped matmul of 8-bit operands.
#ifndef JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_FP8_H_
#define JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_FP8_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/kernels/matmul/call.h"
#include "ffi/runtime/calls/config.h"
#include "ffi/runtime/calls/signatures.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

struct Fp8Matmul {
  Fp8Kind kind;
  const void* lhs;          // [M, K]
  const float* lhs_scales;  // [M, ceil(K / 128)], or [M] if there are no blocks
  const void* rhs;          // [L, N, K]: 8-bit wgmma reads K-major operands only
  const float* rhs_scales;  // [L, ceil(N / 128), ceil(K / 128)], or [L, N]
  const int32_t* group_sizes;
  void* out;  // [M, N], bfloat16 or float32
  bool zero_tail = true;
  int64_t num_sms = 0;  // 0: all
};

// A gated activation of the results of kBlock128, which are quantized again.
struct Fp8Activation {
  Activation activation;
  bool power_of_two_scales;  // rounds out_scales up
  const float* row_weights;  // [M], or null
  float* out_scales;         // [M, F / 128]
  void* pre_activation;      // bfloat16[M, 2F], or null
};

// Checks whether the kernels support a call. Called when XLA compiles it, and by the launch.
Status CheckGroupedMatmulFp8Launch(int64_t num_sms, const GroupedMatmulSizes& sizes);

// Computes out[rows of group g] = lhs[rows of group g] * transpose(rhs[g]), values times scales, in
// one kernel on `stream`. `sizes` counts 8-bit values; of its types only the result's is read.
// tile_counter and groups are those of LaunchGroupedMatmul. The device's compute capability is 9.0.
Status LaunchGroupedMatmulFp8(const Fp8Matmul& call, const GroupedMatmulSizes& sizes,
                              int32_t tile_counter, cudaStream_t stream);

// The same for the activation. N is F, the columns of the result.
Status CheckGroupedMatmulFp8ActivationLaunch(Activation activation, int64_t num_sms,
                                             const GroupedMatmulSizes& sizes);

// Computes activation(gate) * up * row_weights in float32, and quantizes it to call.out, E4M3[M,
// F]. rhs is [L, 2F, K]: the columns of the gate, then those of up. The tail is not written.
Status LaunchGroupedMatmulFp8Activation(const Fp8Matmul& call, const Fp8Activation& activation,
                                        const GroupedMatmulSizes& sizes, int32_t tile_counter,
                                        cudaStream_t stream);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_FP8_H_
