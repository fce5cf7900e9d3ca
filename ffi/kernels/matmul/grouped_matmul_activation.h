// Launches grouped matmuls with a bias, an activation and row weights, and their gradient.
#ifndef JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_ACTIVATION_H_
#define JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_ACTIVATION_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/runtime/config.h"
#include "ffi/runtime/signatures.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// Whether the kernels take a call, forward or gradient.
Status CheckGroupedMatmulActivationLaunch(const GroupedMatmulActivationConfig& config,
                                          const GroupedMatmulSizes& sizes);

struct GroupedMatmulActivationBuffers {
  const void* lhs;
  const void* rhs;
  const int32_t* group_sizes;
  const float* bias;         // or null
  const float* row_weights;  // or null
  void* out;
  void* pre_activation;  // or null
};

// pre = lhs * rhs[group] + bias[group], rounded; out = row weight * activation(pre). Without an
// activation out is rounded once. Rows past the last group are neither read nor written.
Status LaunchGroupedMatmulActivation(const GroupedMatmulActivationConfig& config,
                                     const GroupedMatmulSizes& sizes,
                                     const GroupedMatmulActivationBuffers& buffers,
                                     int32_t tile_counter, cudaStream_t stream);

struct GroupedMatmulActivationGradientBuffers {
  const void* out_gradient;
  const void* rhs;
  const int32_t* group_sizes;
  const void* pre_activation;
  const float* row_weights;  // or null
  void* pre_activation_gradient;
  void* hidden;
  float* row_dots;
};

// With d = out_gradient * transpose(rhs[group]) and h = activation(pre): the gradient of pre from
// row weight * d, hidden = row weight * h, and the sums of h * d over blocks of 128 columns.
Status LaunchGroupedMatmulActivationGradient(const GroupedMatmulActivationConfig& config,
                                             const GroupedMatmulSizes& sizes,
                                             const GroupedMatmulActivationGradientBuffers& buffers,
                                             int32_t tile_counter, cudaStream_t stream);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_ACTIVATION_H_
