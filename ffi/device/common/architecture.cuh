// The architecture that the running device code was compiled for.
#ifndef JAX_EP_DEVICE_COMMON_ARCHITECTURE_CUH_
#define JAX_EP_DEVICE_COMMON_ARCHITECTURE_CUH_

namespace jax_ep {

// Returns __CUDA_ARCH__ (900 for compute capability 9.0), plus 1 if the code was compiled for
// sm_90a, whose architecture-specific instructions it may then use.
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
