// Loads a kernel's code before its first launch.
#ifndef JAX_EP_KERNELS_LOAD_KERNEL_H_
#define JAX_EP_KERNELS_LOAD_KERNEL_H_

#include <cuda_runtime_api.h>

#include "ffi/runtime/cuda/device_cuda.h"

namespace jax_ep {

// Loads the code on the current device, for blocks of up to so much dynamic shared memory. `what`
// is for errors.
inline Status LoadKernel(const void* kernel, int shared_bytes, const char* what) {
  Status status = FromCuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
      what);
  if (!status.ok()) return status;
  cudaFuncAttributes attributes;  // setting an attribute may not load the code; reading does
  return FromCuda(cudaFuncGetAttributes(&attributes, kernel), what);
}

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_LOAD_KERNEL_H_
