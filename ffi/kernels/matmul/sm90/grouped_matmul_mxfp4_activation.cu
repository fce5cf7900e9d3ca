// Grouped matmul of bfloat16 rows and MXFP4 weights, followed by a bias, a gated activation and row
// weights, for sm_90a.
#include "ffi/device/matmul/sm90/mxfp4_roles.cuh"
#include "ffi/kernels/matmul/sm90/kernels.h"

namespace jax_ep::sm90 {

__global__ void __launch_bounds__(kThreads, 1)
    GroupedMatmulMxFp4ActivationKernel(const __grid_constant__ MatmulTensorMaps maps,
                                       const __grid_constant__ MatmulParams params,
                                       const __grid_constant__ MxFp4Scales scales,
                                       const __grid_constant__ GateLimits limits) {
  RunMxFp4Roles<MatmulKind::kActivation>(maps, params, scales, limits);
}

}  // namespace jax_ep::sm90

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

Sm90Kernel Sm90MxFp4ActivationKernel() {
  Sm90Kernel kernel = Sm90MxFp4MatmulKernel();
  kernel.kernel.address = reinterpret_cast<const void*>(sm90::GroupedMatmulMxFp4ActivationKernel);
  return kernel;
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
