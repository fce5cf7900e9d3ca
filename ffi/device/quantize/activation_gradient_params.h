// Arguments of the kernel that quantizes gradients of gated activations.
#ifndef JAX_EP_DEVICE_QUANTIZE_ACTIVATION_GRADIENT_PARAMS_H_
#define JAX_EP_DEVICE_QUANTIZE_ACTIVATION_GRADIENT_PARAMS_H_

#include "ffi/device/matmul/params.h"
#include "ffi/device/quantize/transposed_params.h"

namespace jax_ep {

// Arrays of rows are bfloat16. F is a multiple of 128.
struct ActivationGradientParams {
  const void* activations_gradient;  // [rows, F], of activations without row weights
  const void* pre_activation;        // [rows, 2F], the gate's columns first
  const float* row_weights;          // [rows], or null
  float* row_dots;                   // [rows, F / 128]
  ActivationFunction activation;
  QuantizeTransposedParams activations;              // F columns, without x and rows
  QuantizeTransposedParams pre_activation_gradient;  // 2F columns, without x
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_QUANTIZE_ACTIVATION_GRADIENT_PARAMS_H_
