// Activations in float64, and bounds for kernels that compute them in float32.
#ifndef JAX_EP_TESTS_CPP_GPU_MATMUL_ACTIVATION_BOUNDS_H_
#define JAX_EP_TESTS_CPP_GPU_MATMUL_ACTIVATION_BOUNDS_H_

#include <algorithm>
#include <cmath>

#include "ffi/runtime/calls/config.h"
#include "tests/cpp/gpu/intervals.h"

namespace harness {

using jax_ep::Activation;

struct ActivationBounds {
  Interval value;
  Interval derivative;
};

// x * sigmoid(a(x)) and its derivative sigmoid * (1 + x * (1 - sigmoid) * a'(x)), with the first
// order of float32's errors, rounded up, in units of kRounding.
inline ActivationBounds SmoothBounds(double x, double a, double a_derivative) {
  const double sigmoid = 1 / (1 + std::exp(-a));
  const double rest = 1 / (1 + std::exp(a));  // 1 - sigmoid
  // a has five roundings of constants and four of operations. It is an exponent, so its relative
  // error becomes an absolute one; ex2.approx adds 4 (2 units in the last place). This is the error
  // of the power, which has the weight `rest` in the sum with 1. The sum adds 1, rcp.approx 2. A
  // power that overflows, or a reciprocal that is denormal, flushes values below 2^-126 to zero.
  const double sigmoid_error = sigmoid * (rest * (6 + 10 * std::abs(a)) + 4) * kRounding + 0x1p-126;
  const double product = std::abs(x) * a_derivative;
  // An error of sigmoid enters the derivative's sum in full, and sigmoid * (1 - sigmoid) at most in
  // full. a' has seven roundings, the products four; the sum is up to 1.2.
  const double derivative_error =
      sigmoid_error * (1 + product) + (12 * product * sigmoid + 2) * kRounding;
  return {Around(x * sigmoid, std::abs(x) * (sigmoid_error + sigmoid * kRounding)),
          Around(sigmoid + x * sigmoid * rest * a_derivative, derivative_error)};
}

// Bounds at a 16-bit number, whose square is exact in float32.
inline ActivationBounds BoundsAt(Activation activation, double x) {
  const double positive = std::max(x, 0.0);
  switch (activation) {
    case Activation::kSilu:
    case Activation::kSwiglu:
      return SmoothBounds(x, x, 1);
    case Activation::kGelu:
    case Activation::kGeglu: {
      // x / 2 * (1 + tanh(a / 2)) is x * sigmoid(a).
      constexpr double kTwiceRoot = 1.5957691216057307118;  // 2 * sqrt(2 / pi)
      constexpr double kCubic = 0.044715;
      return SmoothBounds(x, kTwiceRoot * (x + kCubic * x * x * x),
                          kTwiceRoot * (1 + 3 * kCubic * x * x));
    }
    case Activation::kRelu2:
      return {Around(positive * positive, 0), Around(2 * positive, 0)};
    case Activation::kRelu:
    case Activation::kNone:  // has no bounds of its own
      break;
  }
  return {Around(positive, 0), Around(x > 0 ? 1 : 0, 0)};
}

// Bounds over an interval, from its ends. The activation has its minimum near -1.3 or -0.75, but
// between 16-bit neighbors there it changes by less than its error.
inline Interval ValueOn(Activation activation, const Interval& x) {
  const Interval at_low = BoundsAt(activation, x.low).value;
  return x.low == x.high ? at_low : Hull(at_low, BoundsAt(activation, x.high).value);
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MATMUL_ACTIVATION_BOUNDS_H_
