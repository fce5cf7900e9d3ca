// What the running code was compiled for.
#ifndef JAX_EP_DEVICE_COMMON_ARCHITECTURE_CUH_
#define JAX_EP_DEVICE_COMMON_ARCHITECTURE_CUH_

namespace jax_ep {

// 10 * compute capability (900 for 9.0), and 1 more if sm_90a's own instructions may be used.
__device__ inline int CompiledArchitecture() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  return __CUDA_ARCH__ + 1;
#elif defined(__CUDA_ARCH__)
  return __CUDA_ARCH__;
#else
  return 0;
#endif
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_COMMON_ARCHITECTURE_CUH_
