// What the kernels are told of an activation.
#ifndef JAX_EP_KERNELS_MATMUL_ACTIVATION_FUNCTION_H_
#define JAX_EP_KERNELS_MATMUL_ACTIVATION_FUNCTION_H_

#include <limits>

#include "ffi/device/matmul/problem.h"
#include "ffi/runtime/config.h"

namespace jax_ep {

// gelu in its tanh form: x / 2 * (1 + tanh(u)) is x * sigmoid(2 * u), u = c * (x + 0.044715 * x^3)
// with c the root of 2 / pi.
inline ActivationFunction FunctionOf(Activation activation) {
  constexpr float kTwiceRoot = 1.5957691216057308f;
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
      // Not 0: kernels multiply it by x^2, and 0 * infinity is NaN. No result shows it.
      f.cubic = std::numeric_limits<float>::min();
      break;
    case Activation::kGelu:
    case Activation::kGeglu:
      f.is_smooth = true;
      f.linear = kTwiceRoot;
      f.cubic = 0.044715f * kTwiceRoot;
      break;
  }
  constexpr float kLog2E = 1.4426950408889634f;
  f.power_linear = -kLog2E * f.linear;
  f.power_cubic = -kLog2E * f.cubic;
  return f;
}

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_ACTIVATION_FUNCTION_H_
