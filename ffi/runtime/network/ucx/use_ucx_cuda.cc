// UCX as the network of this process's GPUs.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/runtime/cuda/device_cuda.h"
#include "ffi/runtime/cuda/driver.h"
#include "ffi/runtime/debug.h"
#include "ffi/runtime/network/networks.h"
#include "ffi/runtime/network/paced_network.h"
#include "ffi/runtime/network/thread_cpus.h"
#include "ffi/runtime/network/ucx/ucx.h"

namespace jax_ep {
namespace {

constexpr unsigned kDriverVersion = 12000;  // declares cuStreamBatchMemOp as below

// A copy to a GPU would wait for all launches that are queued before it, and these for the copy.
Status CheckQueues() {
  const char* const connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  if (connections == nullptr || std::strcmp(connections, "1") != 0) return {};
  return FailedPrecondition(
      "CUDA_DEVICE_MAX_CONNECTIONS is 1; expected 2 or more, or that it is not set. With one "
      "queue, "
      "what arrives over the network waits behind the kernels that wait for it");
}

using BatchMemOp = CUresult(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);
constexpr size_t kMostOps = 256;  // per batch

// Copies in a stream that waits for no kernel, in which a flag comes after all that was copied
// before it.
class CudaMemory final : public UcxDeviceMemory {
 public:
  CudaMemory(cudaStream_t stream, BatchMemOp* write) : stream_(stream), write_(write) {}

  Status Copy(void* to, const void* from, size_t bytes) override {
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream_);
    return FromCuda(error, "copying what has arrived over the network");
  }

  // A copy of 8 bytes would take the thread longer than UCX takes for their message.
  Status WriteFlags(const std::vector<UcxFlag>& flags) override {
    std::vector<CUstreamBatchMemOpParams> ops(std::min(flags.size(), kMostOps));
    for (size_t first = 0; first < flags.size(); first += kMostOps) {
      const size_t count = std::min(flags.size() - first, kMostOps);
      for (size_t i = 0; i < count; ++i) {
        ops[i] = {};
        ops[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
        ops[i].writeValue.address = reinterpret_cast<CUdeviceptr>(flags[first + i].to);
        ops[i].writeValue.value64 = flags[first + i].value;
        ops[i].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;  // after all before it
      }
      const CUresult error = write_(stream_, static_cast<unsigned>(count), ops.data(), 0);
      if (error == CUDA_SUCCESS) continue;
      return FailedPrecondition("jax_ep: cuStreamBatchMemOp returns ", int(error),
                                " for flags of the network");
    }
    return {};
  }

  Status AwaitFlags() override {
    return FromCuda(cudaStreamSynchronize(stream_), "writing flags of the network");
  }

 private:
  const cudaStream_t stream_;
  BatchMemOp* const write_;
};

Status MakeUcx(const std::string& folder, int device, std::unique_ptr<Network>* network) {
  const CurrentDevice current(device);
  cudaStream_t stream = nullptr;  // lives as long as the process
  BatchMemOp* write = nullptr;
  Status status = FromCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                           "making a stream for the network");
  if (status.ok()) status = FindDriverFunction("cuStreamBatchMemOp", kDriverVersion, &write);
  if (!status.ok()) return status;
  UcxOptions options;
  options.folder = folder;
  options.device_memory = std::make_shared<CudaMemory>(stream, write);
  return MakeUcxNetwork(options, network);
}

Status MakeNetwork(const std::string& folder, const Pace& pace, int device,
                   std::unique_ptr<Network>* network) {
  Status status = MakeUcx(folder, device, network);
  if (status.ok() && pace.is_set()) {
    *network = std::make_unique<PacedNetwork>(std::move(*network), pace);
  }
  return status;
}

// Begins the thread of a GPU's network: it polls, and reads and writes what the GPU does.
void BeginThread(const NetworkCpus& cpus, int device) {
  static_cast<void>(cudaSetDevice(device));
  char address[32] = "";  // on the PCI bus, such as "0000:1B:00.0"
  static_cast<void>(cudaDeviceGetPCIBusId(address, sizeof address, device));
  const bool is_bound = BindThread(cpus.are_near_the_gpu ? CpusNear(address) : cpus.given);
  Debug("the network thread of GPU ", device, " (", address, ") runs on ",
        !is_bound               ? "any CPU"
        : cpus.are_near_the_gpu ? "the CPUs next to it"
                                : "the CPUs of JAX_EP_NETWORK_CPUS");
}

}  // namespace

Status UseUcx(const std::string& folder) {
  if (Status status = CheckQueues(); !status.ok()) return status;
  if (Status status = CheckUcx(folder); !status.ok()) return status;
  NetworkCpus cpus;
  if (Status status = ReadNetworkCpus(&cpus); !status.ok()) return status;
  Pace pace;
  if (Status status = ReadPace(&pace); !status.ok()) return status;
  Networks::OfProcess().Use(
      [folder, pace](int device, std::unique_ptr<Network>* network) {
        return MakeNetwork(folder, pace, device, network);
      },
      [cpus](int device) { BeginThread(cpus, device); });
  return {};
}

}  // namespace jax_ep
