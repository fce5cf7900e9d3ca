// Queries of the CUDA runtime, as a Status that names the query. Only in builds with CUDA.
#ifndef JAX_EP_RUNTIME_CUDA_DEVICE_CUDA_H_
#define JAX_EP_RUNTIME_CUDA_DEVICE_CUDA_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "ffi/runtime/status.h"

namespace jax_ep {

Status FromCuda(cudaError_t error, const char* what);

// Adds the GPU to the message of an error.
Status OnGpu(int device, const Status& status);

// Counts the current device's SMs.
Status CountSms(int64_t* count);

struct ComputeCapability {
  int major = 0;
  int minor = 0;

  friend bool operator==(ComputeCapability, ComputeCapability) = default;
};

// Finds the current device's.
Status FindComputeCapability(ComputeCapability* capability);

// Finds the most shared memory that a block can have, in bytes.
Status FindSharedBytes(int* bytes);

// Finds the width of the bus to device memory, in bits.
Status FindMemoryBusBits(int* bits);

// Returns "GPU-" and the device's UUID as nvidia-smi prints it, or an empty string.
std::string FindUuid(int device);

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

#endif  // JAX_EP_RUNTIME_CUDA_DEVICE_CUDA_H_
