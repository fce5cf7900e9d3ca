#include <cuda_runtime_api.h>

#include "ffi/runtime/cuda/device_cuda.h"
#include "ffi/runtime/cuda/driver.h"

namespace jax_ep {

CudaVersions QueryCudaVersions() {
  CudaVersions versions;
  if (cudaDriverGetVersion(&versions.driver) != cudaSuccess) versions.driver = 0;
  if (cudaRuntimeGetVersion(&versions.runtime) != cudaSuccess) versions.runtime = CUDART_VERSION;
  return versions;
}

Status FindDriverFunction(const char* name, unsigned version, void** function) {
  cudaDriverEntryPointQueryResult result;
  Status status = FromCuda(
      cudaGetDriverEntryPointByVersion(name, function, version, cudaEnableDefault, &result),
      Concatenate("finding ", name).c_str());
  if (status.ok() && *function == nullptr) {
    return FailedPrecondition("the NVIDIA driver has no ", name, "; update it");
  }
  return status;
}

}  // namespace jax_ep
