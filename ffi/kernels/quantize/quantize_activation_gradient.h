// Launches the kernel that quantizes gradients of gated activations.
#ifndef JAX_EP_KERNELS_QUANTIZE_QUANTIZE_ACTIVATION_GRADIENT_H_
#define JAX_EP_KERNELS_QUANTIZE_QUANTIZE_ACTIVATION_GRADIENT_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/runtime/calls/config.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// How scales follow from magnitudes.
struct ScaleOptions {
  float min_amax = 0;
  bool power_of_two_scales = false;
};

// Arrays of rows that are not quantized are bfloat16. A row block is up to 128 rows of one group,
// see QuantizeTransposedParams.
struct QuantizeActivationGradient {
  Activation activation = Activation::kSwiglu;  // gated
  int64_t num_rows = 0;
  int64_t columns = 0;  // F, a multiple of 128
  int64_t row_blocks = 0;
  ScaleOptions of_activations = {};            // for the activations
  ScaleOptions of_gradient = {};               // for the pre-activation's gradient
  const void* activations_gradient = nullptr;  // [num_rows, F]
  const void* pre_activation = nullptr;        // [num_rows, 2F], the gate's columns first
  const float* row_weights = nullptr;          // [num_rows], or null
  const int32_t* first_rows = nullptr;         // [row_blocks]
  const int32_t* block_rows = nullptr;         // [row_blocks]
  uint8_t* row_values = nullptr;               // the gradient as it is: [num_rows, 2F]
  float* row_scales = nullptr;                 // [num_rows, 2F / 128]
  uint8_t* values = nullptr;                   // and transposed: [row_blocks, 2F, 128]
  float* scales = nullptr;                     // [row_blocks, 2F / 128]
  uint8_t* activation_values = nullptr;        // [row_blocks, F, 128], with row weights
  float* activation_scales = nullptr;          // [row_blocks, F]
  float* row_dots = nullptr;                   // [num_rows, F / 128]
};

// Loads the kernel on the current device, see LoadMatmulKernels.
Status LoadQuantizeActivationGradientKernels();

// Checks whether the kernel supports the sizes. Called when XLA compiles a call, and by the launch.
Status CheckQuantizeActivationGradientLaunch(int64_t num_rows, int64_t columns, int64_t row_blocks);

// Computes and quantizes on `stream`.
Status LaunchQuantizeActivationGradient(const QuantizeActivationGradient& call,
                                        cudaStream_t stream);

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_QUANTIZE_QUANTIZE_ACTIVATION_GRADIENT_H_
