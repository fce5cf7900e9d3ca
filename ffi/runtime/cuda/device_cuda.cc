#include "ffi/runtime/cuda/device_cuda.h"

#include <cstdio>

namespace jax_ep {
namespace {

// Reads an attribute of the current device.
Status FindAttribute(cudaDeviceAttr attribute, const char* what, int* value) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(value, attribute, device);
  return FromCuda(error, what);
}

}  // namespace

Status FromCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  static_cast<void>(cudaGetLastError());  // clears it, so that a later query does not report it
  return FailedPrecondition(what, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
}

Status OnGpu(int device, const Status& status) {
  if (status.ok()) return status;
  return {status.code, Concatenate("jax_ep: GPU ", device, ": ", status.message)};
}

Status CountSms(int64_t* count) {
  int value = 0;
  Status status = FindAttribute(cudaDevAttrMultiProcessorCount, "the number of SMs", &value);
  *count = value;
  return status;
}

Status FindComputeCapability(ComputeCapability* capability) {
  constexpr char kWhat[] = "the compute capability";
  Status status = FindAttribute(cudaDevAttrComputeCapabilityMajor, kWhat, &capability->major);
  if (!status.ok()) return status;
  return FindAttribute(cudaDevAttrComputeCapabilityMinor, kWhat, &capability->minor);
}

Status FindSharedBytes(int* bytes) {
  return FindAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, "the shared memory of a block",
                       bytes);
}

Status FindMemoryBusBits(int* bits) {
  return FindAttribute(cudaDevAttrGlobalMemoryBusWidth, "the width of the memory bus", bits);
}

std::string FindUuid(int device) {
  cudaDeviceProp properties = {};
  if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) return "";
  std::string uuid = "GPU";
  for (size_t i = 0; i < sizeof properties.uuid.bytes; ++i) {
    char text[4];
    const bool has_dash = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
    std::snprintf(text, sizeof text, has_dash ? "-%02x" : "%02x",
                  static_cast<unsigned>(static_cast<unsigned char>(properties.uuid.bytes[i])));
    uuid += text;
  }
  return uuid;
}

CurrentDevice::CurrentDevice(int device) {
  cudaError_t error = cudaGetDevice(&before_);
  if (error == cudaSuccess) error = cudaSetDevice(device);
  status_ = FromCuda(error, "choosing a device");
}

CurrentDevice::~CurrentDevice() { static_cast<void>(cudaSetDevice(before_)); }

}  // namespace jax_ep
