// Activations in float64, and around them what kernels that compute in float32 may have.
#ifndef JAX_EP_TESTS_CPP_GPU_ACTIVATION_BOUNDS_H_
#define JAX_EP_TESTS_CPP_GPU_ACTIVATION_BOUNDS_H_

#include <algorithm>
#include <cmath>

#include "ffi/runtime/config.h"
#include "tests/cpp/gpu/intervals.h"

namespace harness {

using jax_ep::Activation;

struct ActivationBounds {
  Interval value;
  Interval slope;
};

// x * sigmoid(a(x)) and its slope sigmoid * (1 + x * (1 - sigmoid) * a'(x)), with float32's errors
// as far as they go in the first order, rounded up; all are counted in units of kRounding.
inline ActivationBounds SmoothBounds(double x, double a, double a_slope) {
  const double sigmoid = 1 / (1 + std::exp(-a));
  const double rest = 1 / (1 + std::exp(a));  // 1 - sigmoid
  // Five roundings of constants and four of operations are in a, which is an exponent, where what
  // was relative is absolute; ex2.approx adds 4 (2 units in the last place). That is of the power,
  // which has `rest` of the weight in the sum with 1; the sum adds 1, rcp.approx 2. A power that
  // overflows, or a reciprocal that is denormal, makes zero of less than 2^-126.
  const double sigmoid_error = sigmoid * (rest * (6 + 10 * std::abs(a)) + 4) * kRounding + 0x1p-126;
  const double product = std::abs(x) * a_slope;
  // An error of sigmoid is as large in the slope's sum, and at most so in sigmoid * (1 - sigmoid).
  // Seven roundings are in a', four in the products; the sum is up to 1.2.
  const double slope_error =
      sigmoid_error * (1 + product) + (12 * product * sigmoid + 2) * kRounding;
  return {Around(x * sigmoid, std::abs(x) * (sigmoid_error + sigmoid * kRounding)),
          Around(sigmoid + x * sigmoid * rest * a_slope, slope_error)};
}

// At a number of 16 bits, whose square float32 has without error.
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

// On what is left open of a rounded sum. The value is least and most at the ends: it turns near
// -1.3 or -0.75, but what it does between neighbors there is less than its error.
inline Interval ValueOn(Activation activation, const Interval& x) {
  const Interval at_low = BoundsAt(activation, x.low).value;
  return x.low == x.high ? at_low : Hull(at_low, BoundsAt(activation, x.high).value);
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_ACTIVATION_BOUNDS_H_
