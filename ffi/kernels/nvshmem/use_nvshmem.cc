// NVSHMEM as the network of this process's GPU.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/kernels/nvshmem/cubin.h"
#include "ffi/kernels/transfer/kernels.h"
#include "ffi/runtime/cuda/device_cuda.h"
#include "ffi/runtime/cuda/driver.h"
#include "ffi/runtime/network/networks.h"
#include "ffi/runtime/network/nvshmem/nvshmem.h"
#include "ffi/runtime/network/nvshmem/nvshmem_network.h"

namespace jax_ep {
namespace {

constexpr const char* kPutKernel = "jax_ep_nvshmem_put";

cudaLibrary_t kernels = nullptr;    // has the kernels of the cubin
cudaKernel_t put_kernel = nullptr;  // puts for the host

// The cubin has code for Hopper only.
Status CheckDevice(int device) {
  const CurrentDevice current(device);
  ComputeCapability capability;
  Status status = FindComputeCapability(&capability);
  if (!status.ok() || capability == ComputeCapability{9, 0}) return OnGpu(device, status);
  return OnGpu(device, FailedPrecondition("it has compute capability ", capability.major, ".",
                                          capability.minor,
                                          "; the kernels for NVSHMEM are compiled for 9.0"));
}

// Has NVSHMEM write its state into the module, which the kernels read.
Status InitializeModule(const NvshmemLibrary& library) {
  using GetModule = CUresult(CUmodule*, CUlibrary);
  GetModule* get_module = nullptr;
  Status status = FindDriverFunction("cuLibraryGetModule", 12000, &get_module);
  if (!status.ok()) return status;
  CUmodule module = nullptr;
  if (const CUresult error = get_module(&module, kernels); error != CUDA_SUCCESS) {
    return FailedPrecondition("loading the kernels for NVSHMEM: cuLibraryGetModule fails with ",
                              static_cast<int>(error));
  }
  if (const int code = library.nvshmemx_cumodule_init(module)) {
    return FailedPrecondition("NVSHMEM ", library.version, " (", library.path,
                              ") fails in nvshmemx_cumodule_init with status ", code,
                              "; NVSHMEM_DEBUG=INFO in the environment has it say more");
  }
  return {};
}

// A kernel of the cubin has the same name as the one that it replaces.
Status LoadKernels(const NvshmemLibrary& library) {
  Status status = FromCuda(
      cudaLibraryLoadData(&kernels, NvshmemCubin(), nullptr, nullptr, 0, nullptr, nullptr, 0),
      "loading the kernels for NVSHMEM");
  if (status.ok()) status = InitializeModule(library);
  std::vector<TransferKernel> replaced;
  if (status.ok()) status = ListTransferKernels(true, &replaced);
  KernelReplacements by;
  for (const TransferKernel& kernel : replaced) {
    const char* name = nullptr;
    cudaKernel_t found = nullptr;
    if (status.ok()) status = FromCuda(cudaFuncGetName(&name, kernel.address), "naming a kernel");
    if (status.ok()) status = FromCuda(cudaLibraryGetKernel(&found, kernels, name), name);
    if (status.ok()) status = LoadKernel({found, kernel.shared_bytes});
    by[kernel.address] = found;
  }
  if (status.ok()) {
    status = FromCuda(cudaLibraryGetKernel(&put_kernel, kernels, kPutKernel), kPutKernel);
  }
  if (status.ok()) status = LoadKernel({put_kernel, 0});
  if (status.ok()) ReplaceKernels(std::move(by));
  return status;
}

Status MakeNetwork(NvshmemWorld* world, int device, std::unique_ptr<Network>* network) {
  if (world->pe() < 0) {
    return FailedPrecondition(
        "NVSHMEM needs a process for each GPU, and one process drives all ranks; start as many "
        "processes, or set JAX_EP_NETWORK=ucx");
  }
  const CurrentDevice current(device);
  cudaStream_t stream = nullptr;  // lives as long as the process
  Status status = FromCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                           "making a stream for the network");
  if (!status.ok()) return status;
  NvshmemStream puts;
  puts.put = [stream](const NvshmemPutParams& params) {
    void* arguments[] = {const_cast<NvshmemPutParams*>(&params)};
    return FromCuda(cudaLaunchKernel(put_kernel, dim3(1), dim3(1), arguments, 0, stream),
                    kPutKernel);
  };
  puts.query = [stream](bool* is_idle) {
    const cudaError_t error = cudaStreamQuery(stream);
    *is_idle = error != cudaErrorNotReady;
    return *is_idle ? FromCuda(error, kPutKernel) : Status{};
  };
  *network = std::make_unique<NvshmemNetwork>(world, std::move(puts));
  return {};
}

}  // namespace

Status UseNvshmem(const std::string& folder) {
  if (NvshmemCubin() == nullptr) {
    return FailedPrecondition(
        "jax_ep: this build has no kernels for NVSHMEM; expected nvidia-nvshmem-cu13 when it was "
        "built");
  }
  const NvshmemLibrary* library = nullptr;
  if (Status status = OpenNvshmem(folder, &library); !status.ok()) return status;
  NvshmemOptions options;
  options.folder = folder;
  options.check = CheckDevice;
  options.on_device = [](int device, const std::function<Status()>& function) {
    const CurrentDevice current(device);
    return current.status().ok() ? function() : current.status();
  };
  options.load_kernels = LoadKernels;
  static auto* const world = new NvshmemWorld(std::move(options));  // threads may outlive statics
  Networks::OfProcess().Use(
      [](int device, std::unique_ptr<Network>* network) {
        return MakeNetwork(world, device, network);
      },
      [](int device) { static_cast<void>(cudaSetDevice(device)); });
  Networks::OfProcess().UseJoin(
      [](const NetworkMembers& members, const Status& own) { return world->Join(members, own); });
  return {};
}

}  // namespace jax_ep
