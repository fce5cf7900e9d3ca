// The installed NVIDIA driver: its functions, and whether it can run what this build was compiled
// for.
#ifndef JAX_EP_RUNTIME_CUDA_DRIVER_H_
#define JAX_EP_RUNTIME_CUDA_DRIVER_H_

#include <string>

#include "ffi/runtime/status.h"

namespace jax_ep {

// Versions as CUDA writes them, 1000 * major + 10 * minor.
struct CudaVersions {
  int driver = 0;   // the newest CUDA that the driver supports; 0: there is no driver
  int runtime = 0;  // the toolkit that compiled this build
};

std::string CudaVersionText(int version);  // 12040 -> "12.4"

// Fails if the driver is older than the toolkit's major version. Within a major version an older
// driver runs the code of a newer toolkit.
Status CheckDriver(const CudaVersions& versions);

// Queries the CUDA runtime that is linked in. Creates no context. Only in builds with CUDA.
CudaVersions QueryCudaVersions();

// Finds a function of the loaded driver, as CUDA `version` declares it: libcuda is not linked. Sets
// `function` to null on an error. Only in builds with CUDA.
Status FindDriverFunction(const char* name, unsigned version, void** function);

template <typename Function>
Status FindDriverFunction(const char* name, unsigned version, Function** function) {
  void* found = nullptr;
  Status status = FindDriverFunction(name, version, &found);
  *function = reinterpret_cast<Function*>(found);
  return status;
}

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_CUDA_DRIVER_H_
