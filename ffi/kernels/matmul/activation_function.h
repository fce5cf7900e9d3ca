// The parameters of an activation, as the kernels take them.
#ifndef JAX_EP_KERNELS_MATMUL_ACTIVATION_FUNCTION_H_
#define JAX_EP_KERNELS_MATMUL_ACTIVATION_FUNCTION_H_

#include <limits>

#include "ffi/device/matmul/params.h"
#include "ffi/runtime/calls/config.h"

namespace jax_ep {

// Smooth activations are x * sigmoid(u). silu has u = x. gelu's tanh form, x / 2 * (1 + tanh(v))
// with v = sqrt(2 / pi) * (x + 0.044715 * x^3), has u = 2 * v.
inline ActivationFunction MakeActivationFunction(Activation activation) {
  constexpr float kTwiceSqrtTwoOverPi = 1.5957691216057308f;
  ActivationFunction f = {};
  f.is_identity = activation == Activation::kNone;
  f.is_gated = IsGated(activation);
  switch (activation) {
    case Activation::kNone:
    case Activation::kRelu:
      break;
    case Activation::kRelu2:
      f.is_squared = true;
      break;
    case Activation::kSilu:
    case Activation::kSwiglu:
      f.is_smooth = true;
      f.linear = 1;
      // Not 0: kernels multiply it by x^2, and 0 * infinity is NaN. It is too small to show in any
      // result.
      f.cubic = std::numeric_limits<float>::min();
      break;
    case Activation::kGelu:
    case Activation::kGeglu:
      f.is_smooth = true;
      f.linear = kTwiceSqrtTwoOverPi;
      f.cubic = 0.044715f * kTwiceSqrtTwoOverPi;
      break;
  }
  constexpr float kLog2E = 1.4426950408889634f;
  f.exp2_linear = -kLog2E * f.linear;
  f.exp2_cubic = -kLog2E * f.cubic;
  return f;
}

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_ACTIVATION_FUNCTION_H_
