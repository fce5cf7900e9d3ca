#include <cuda_runtime_api.h>

#include "ffi/runtime/driver.h"

namespace jax_ep {

CudaVersions QueryCudaVersions() {
  CudaVersions versions;
  if (cudaDriverGetVersion(&versions.driver) != cudaSuccess) versions.driver = 0;
  if (cudaRuntimeGetVersion(&versions.runtime) != cudaSuccess) versions.runtime = CUDART_VERSION;
  return versions;
}

}  // namespace jax_ep
