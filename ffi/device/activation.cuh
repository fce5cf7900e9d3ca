// Activations and their slopes.
#ifndef JAX_EP_DEVICE_ACTIVATION_CUH_
#define JAX_EP_DEVICE_ACTIVATION_CUH_

#include "ffi/device/matmul_problem.h"

namespace jax_ep {

// kExact: to float32's last bits. Otherwise to a few, which no 16-bit result shows.
template <bool kExact>
__device__ inline float Sigmoid(float x) {
  if constexpr (kExact) return 1.0f / (1.0f + expf(-x));
  return __fdividef(1.0f, 1.0f + __expf(-x));
}

struct Activated {
  float value;
  float slope;
};

// Whoever needs the value alone leaves the slope to the compiler.
template <bool kExact>
__device__ inline Activated Activate(const ActivationFunction& f, float x) {
  if (f.is_smooth) {
    const float square = f.cubic * x * x;
    const float s = Sigmoid<kExact>((f.linear + square) * x);
    return {x * s, s + x * s * (1.0f - s) * (f.linear + 3.0f * square)};
  }
  // NaN stays NaN, as the comparison is false.
  const float positive = x < 0.0f ? 0.0f : x;
  if (f.is_squared) return {positive * positive, 2.0f * positive};
  return {positive, x > 0.0f ? 1.0f : 0.0f};
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_ACTIVATION_CUH_
