#include "ffi/runtime/device_cuda.h"

namespace jax_ep {

Status FromCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  static_cast<void>(cudaGetLastError());  // not to be found by whoever asks next
  return FailedPrecondition(what, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
}

Status CountMultiprocessors(int64_t* count) {
  int device = 0;
  int value = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device);
  }
  *count = value;
  return FromCuda(error, "the number of multiprocessors");
}

Status IsComputeCapability(int major, int minor, bool* is) {
  int device = 0;
  int found_major = 0;
  int found_minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&found_major, cudaDevAttrComputeCapabilityMajor, device);
  }
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&found_minor, cudaDevAttrComputeCapabilityMinor, device);
  }
  *is = found_major == major && found_minor == minor;
  return FromCuda(error, "the compute capability");
}

CurrentDevice::CurrentDevice(int device) {
  cudaError_t error = cudaGetDevice(&before_);
  if (error == cudaSuccess) error = cudaSetDevice(device);
  status_ = FromCuda(error, "choosing a device");
}

CurrentDevice::~CurrentDevice() { static_cast<void>(cudaSetDevice(before_)); }

}  // namespace jax_ep
