// The installed NVIDIA driver: its functions, and whether it can run what this build was compiled
// for.
#ifndef JAX_EP_RUNTIME_DRIVER_H_
#define JAX_EP_RUNTIME_DRIVER_H_

#include <string>

#include "ffi/runtime/status.h"

namespace jax_ep {

// Versions as CUDA writes them, 1000 * major + 10 * minor.
struct CudaVersions {
  int driver = 0;   // the newest CUDA that the driver supports; 0: there is no driver
  int runtime = 0;  // of the toolkit this build was compiled with
};

std::string CudaVersionText(int version);  // 12040 -> "12.4"

// Within a major version an older driver runs what a newer toolkit compiled; across majors not.
Status CheckDriver(const CudaVersions& versions);

// Asks the CUDA runtime that is linked in. Creates no context; only in builds with CUDA.
CudaVersions QueryCudaVersions();

// Asks the driver that is loaded, since libcuda is not linked, for its function as CUDA `version`
// declares it. Null with an error. Only in builds with CUDA.
Status FindDriverFunction(const char* name, unsigned version, void** function);

template <typename Function>
Status FindDriverFunction(const char* name, unsigned version, Function** function) {
  void* found = nullptr;
  Status status = FindDriverFunction(name, version, &found);
  *function = reinterpret_cast<Function*>(found);
  return status;
}

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_DRIVER_H_
