// Functions of one instruction each; approximations are accurate to about 22 bits.
#ifndef JAX_EP_DEVICE_PTX_MATH_CUH_
#define JAX_EP_DEVICE_PTX_MATH_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

__device__ inline float Exp2Approx(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

__device__ inline float ReciprocalApprox(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}

// Returns the larger value, or NaN if one is NaN.
__device__ inline float MaxNan(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}

// Multiplies pairs of bfloat16 (sm_90). Subnormal numbers are not flushed.
__device__ inline uint32_t MultiplyBFloat16Pairs(uint32_t x, uint32_t y) {
  uint32_t products;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(products) : "r"(x), "r"(y));
  return products;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_MATH_CUH_
