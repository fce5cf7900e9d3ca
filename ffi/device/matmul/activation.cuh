// Activation functions and their derivatives.
#ifndef JAX_EP_DEVICE_MATMUL_ACTIVATION_CUH_
#define JAX_EP_DEVICE_MATMUL_ACTIVATION_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/ptx/math.cuh"

namespace jax_ep {

// The compiler drops the derivative where only the value is used.
struct ActivationResult {
  float value;
  float derivative;
};

__device__ inline ActivationResult ActivateRelu(const ActivationFunction& f, float x) {
  // NaN stays NaN, because the comparison is false.
  const float positive = x < 0.0f ? 0.0f : x;
  if (f.is_squared) return {positive * positive, 2.0f * positive};
  return {positive, x > 0.0f ? 1.0f : 0.0f};
}

__device__ inline ActivationResult ActivateSmooth(const ActivationFunction& f, float x,
                                                  float square, float sigmoid) {
  const float value = x * sigmoid;
  // Clamps an infinite square: its factor is 0 there, and 0 * infinity is NaN. A NaN of x itself
  // still reaches the result through the value.
  const float finite = fminf(square, 3.402823466e+38f);
  return {value, sigmoid + value * (1.0f - sigmoid) * (f.linear + 3.0f * f.cubic * finite)};
}

// Computes with the full precision of float32.
__device__ inline ActivationResult Activate(const ActivationFunction& f, float x) {
  if (!f.is_smooth) return ActivateRelu(f, x);
  const float square = x * x;
  const float argument = (f.linear + f.cubic * square) * x;
  return ActivateSmooth(f, x, square, 1.0f / (1.0f + expf(-argument)));
}

// Computes to about 22 bits, more than a 16-bit result shows, in few instructions. kIsSmooth must
// equal f.is_smooth.
template <bool kIsSmooth>
__device__ inline ActivationResult ActivateFast(const ActivationFunction& f, float x) {
  if constexpr (!kIsSmooth) return ActivateRelu(f, x);
  const float square = x * x;
  // exp(-argument) as a power of two; if it overflows, the sigmoid is 0.
  const float exponent = (f.exp2_linear + f.exp2_cubic * square) * x;
  const float sigmoid = ReciprocalApprox(1.0f + Exp2Approx(exponent));
  return ActivateSmooth(f, x, square, sigmoid);
}

// Change gate and up before they are activated, or not.
struct NoLimits {};
template <typename Limits>
inline constexpr bool kHasLimits = true;
template <>
inline constexpr bool kHasLimits<NoLimits> = false;

__device__ inline void LimitGate(const NoLimits& /*limits*/, float* /*gate*/, float* /*up*/) {}

// NaN stays NaN, because the comparisons are false.
__device__ inline void LimitGate(const GateLimits& limits, float* gate, float* up) {
  if (*gate > limits.limit) *gate = limits.limit;
  if (*up > limits.limit) *up = limits.limit;
  if (*up < -limits.limit) *up = -limits.limit;
  *up += limits.up_offset;
}

// Calls function<kIsGated, kIsSmooth>(), so that the branches on the activation are taken once and
// not for every element. Gated activations are smooth.
template <typename Function>
__device__ inline void SpecializeForActivation(const ActivationFunction& f, Function function) {
  if (f.is_gated) {
    function.template operator()<true, true>();
  } else if (f.is_smooth) {
    function.template operator()<false, true>();
  } else {
    function.template operator()<false, false>();
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_ACTIVATION_CUH_
