// What is asked of the CUDA runtime, with errors that say what failed. Only in builds with CUDA.
#ifndef JAX_EP_RUNTIME_DEVICE_CUDA_H_
#define JAX_EP_RUNTIME_DEVICE_CUDA_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/runtime/status.h"

namespace jax_ep {

Status FromCuda(cudaError_t error, const char* what);

// Of the current device.
Status CountSms(int64_t* count);

Status FindComputeCapabilityMajor(int* major);

// Whether the current device is of exactly this compute capability.
Status IsComputeCapability(int major, int minor, bool* is);

// The most shared memory of a block, in bytes.
Status FindSharedBytes(int* bytes);

// Makes `device` current for this thread until the end of the scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice();

  const Status& status() const { return status_; }

 private:
  int before_ = 0;
  Status status_;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_DEVICE_CUDA_H_
