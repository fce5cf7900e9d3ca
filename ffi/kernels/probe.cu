#include "ffi/device/common/architecture.cuh"
#include "ffi/kernels/probe.h"
#include "ffi/runtime/cuda/driver.h"

namespace jax_ep {

__global__ void ProbeKernel(int* architecture) { *architecture = CompiledArchitecture(); }

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

#include <cuda_runtime.h>

#include "ffi/kernels/probe.h"
#include "ffi/runtime/cuda/driver.h"

namespace jax_ep {
namespace {

// Code for sm_8x is the sm_80 image; what is newer than 9.0 runs the compute_90 PTX.
std::string ArchitectureText(int compiled) {
  if (compiled == 901) return "sm_90a";
  return Concatenate(compiled >= 900 ? "compute_" : "sm_", compiled / 10);
}

cudaError_t RunProbe(int* compiled) {
  cudaFuncAttributes attributes;
  if (cudaError_t error = cudaFuncGetAttributes(&attributes, ProbeKernel)) return error;
  int* result = nullptr;
  if (cudaError_t error = cudaMalloc(&result, sizeof *result)) return error;
  ProbeKernel<<<1, 1>>>(result);
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) {
    error = cudaMemcpy(compiled, result, sizeof *result, cudaMemcpyDeviceToHost);
  }
  const cudaError_t freed = cudaFree(result);
  return error == cudaSuccess ? freed : error;
}

ProbedDevice ProbeDevice(int ordinal) {
  ProbedDevice device;
  device.ordinal = ordinal;
  cudaDeviceProp properties;
  cudaError_t error = cudaGetDeviceProperties(&properties, ordinal);
  if (error == cudaSuccess) {
    device.name = properties.name;
    device.compute_capability = Concatenate(properties.major, ".", properties.minor);
    error = cudaSetDevice(ordinal);
  }
  int compiled = 0;
  if (error == cudaSuccess) error = RunProbe(&compiled);
  if (error == cudaSuccess) {
    device.architecture = ArchitectureText(compiled);
    return device;
  }
  static_cast<void>(cudaGetLastError());  // clears it, so that a later query does not report it
  const bool no_image =
      error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction;
  device.error =
      no_image ? Concatenate("this build of jax_ep has no code for compute capability ",
                             device.compute_capability, "; it has ", JAX_EP_CUDA_ARCHITECTURES)
               : Concatenate(cudaGetErrorName(error), ": ", cudaGetErrorString(error));
  return device;
}

}  // namespace

std::vector<ProbedDevice> ProbeDevices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return {};
  }
  int current = 0;
  const bool restore = cudaGetDevice(&current) == cudaSuccess;
  const CudaVersions versions = QueryCudaVersions();
  std::vector<ProbedDevice> devices;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    devices.push_back(ProbeDevice(ordinal));
    devices.back().driver_version = CudaVersionText(versions.driver);
  }
  if (restore) static_cast<void>(cudaSetDevice(current));
  return devices;
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
