// Launches grouped_matmul_activation and grouped_matmul_activation_gradient.
#ifndef JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_ACTIVATION_H_
#define JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_ACTIVATION_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/runtime/calls/config.h"
#include "ffi/runtime/calls/signatures.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

struct GroupedMatmulActivationBuffers {
  const void* lhs;
  const void* rhs;
  const int32_t* group_sizes;
  const float* bias;         // or null
  const float* row_weights;  // or null
  void* out;
  void* pre_activation;  // or null
};

struct GroupedMatmulActivationGradientBuffers {
  const void* out_gradient;
  const void* rhs;
  const int32_t* group_sizes;
  const void* pre_activation;
  const float* row_weights;  // or null
  void* pre_activation_gradient;
  void* activations;  // times the row weights
  float* row_dots;
};

// Checks whether the kernels support a call, forward or gradient. Called when XLA compiles it, and
// by the launches.
Status CheckGroupedMatmulActivationLaunch(const GroupedMatmulActivationConfig& config,
                                          const GroupedMatmulSizes& sizes);

// Computes pre = lhs * rhs[group] + bias[group], rounded, and out = row weight * activation(pre).
// Without an activation only out is rounded. Rows past the last group are neither read nor written.
Status LaunchGroupedMatmulActivation(const GroupedMatmulActivationConfig& config,
                                     const GroupedMatmulSizes& sizes,
                                     const GroupedMatmulActivationBuffers& buffers,
                                     int32_t tile_counter, cudaStream_t stream);

// Computes, with d = out_gradient * transpose(rhs[group]) and h = activation(pre), the gradient of
// pre from row weight * d, activations = row weight * h, and the dot products of h and d per 128
// columns.
Status LaunchGroupedMatmulActivationGradient(const GroupedMatmulActivationConfig& config,
                                             const GroupedMatmulSizes& sizes,
                                             const GroupedMatmulActivationGradientBuffers& buffers,
                                             int32_t tile_counter, cudaStream_t stream);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_GROUPED_MATMUL_ACTIVATION_H_
