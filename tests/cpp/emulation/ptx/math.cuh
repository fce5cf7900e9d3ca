// Replaces ffi/device/ptx/math.cuh.
#ifndef JAX_EP_DEVICE_PTX_MATH_CUH_
#define JAX_EP_DEVICE_PTX_MATH_CUH_

#include "tests/cpp/emulation/ptx/element_types.cuh"

namespace jax_ep {

__device__ inline float Exp2Approx(float x) { return std::exp2(x); }
__device__ inline float ReciprocalApprox(float x) { return 1.0f / x; }
__device__ inline uint32_t MultiplyBFloat16Pairs(uint32_t x, uint32_t y) {
  float left[2], right[2];
  BFloat16::Unpack(x, left);
  BFloat16::Unpack(y, right);
  const float products[2] = {left[0] * right[0], left[1] * right[1]};
  return BFloat16::Pack(products);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_MATH_CUH_
