// Replaces ffi/device/ptx/math.cuh.
#ifndef JAX_EP_DEVICE_PTX_MATH_CUH_
#define JAX_EP_DEVICE_PTX_MATH_CUH_

namespace jax_ep {

__device__ inline float Exp2Approx(float x) { return std::exp2(x); }
__device__ inline float ReciprocalApprox(float x) { return 1.0f / x; }

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_MATH_CUH_
