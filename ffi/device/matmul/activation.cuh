// Activations and their slopes.
#ifndef JAX_EP_DEVICE_MATMUL_ACTIVATION_CUH_
#define JAX_EP_DEVICE_MATMUL_ACTIVATION_CUH_

#include "ffi/device/matmul/problem.h"
#include "ffi/device/ptx/math.cuh"

namespace jax_ep {

struct Activated {
  float value;
  float slope;
};

// Whoever needs the value alone leaves the slope to the compiler.
__device__ inline Activated ActivateRelu(const ActivationFunction& f, float x) {
  // NaN stays NaN, as the comparison is false.
  const float positive = x < 0.0f ? 0.0f : x;
  if (f.is_squared) return {positive * positive, 2.0f * positive};
  return {positive, x > 0.0f ? 1.0f : 0.0f};
}

__device__ inline Activated ActivateSmooth(const ActivationFunction& f, float x, float square,
                                           float sigmoid) {
  const float value = x * sigmoid;
  // It is multiplied by 0 where it is infinite, which is NaN. NaN itself is in the value, too.
  const float finite = fminf(square, 3.402823466e+38f);
  return {value, sigmoid + value * (1.0f - sigmoid) * (f.linear + 3.0f * f.cubic * finite)};
}

// To float32's last bits.
__device__ inline Activated Activate(const ActivationFunction& f, float x) {
  if (!f.is_smooth) return ActivateRelu(f, x);
  const float square = x * x;
  const float argument = (f.linear + f.cubic * square) * x;
  return ActivateSmooth(f, x, square, 1.0f / (1.0f + expf(-argument)));
}

// To 22 bits, which no 16-bit result shows, and in few instructions. f.is_smooth is kIsSmooth.
template <bool kIsSmooth>
__device__ inline Activated ActivateFast(const ActivationFunction& f, float x) {
  if constexpr (!kIsSmooth) return ActivateRelu(f, x);
  const float square = x * x;
  // exp(-argument) as a power of two; an infinite one makes a sigmoid of 0.
  const float exponent = (f.power_linear + f.power_cubic * square) * x;
  const float sigmoid = ReciprocalApprox(1.0f + Exp2Approx(exponent));
  return ActivateSmooth(f, x, square, sigmoid);
}

// make<kIsGated, kIsSmooth>(), which then has no choices to make. What is gated is smooth.
template <typename Make>
__device__ inline void MakeByKind(const ActivationFunction& f, Make make) {
  if (f.is_gated) {
    make.template operator()<true, true>();
  } else if (f.is_smooth) {
    make.template operator()<false, true>();
  } else {
    make.template operator()<false, false>();
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_ACTIVATION_CUH_
