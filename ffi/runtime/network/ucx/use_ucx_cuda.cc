// UCX as the network of this process's GPUs.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "ffi/runtime/cuda/device_cuda.h"
#include "ffi/runtime/cuda/driver.h"
#include "ffi/runtime/debug.h"
#include "ffi/runtime/network/networks.h"
#include "ffi/runtime/network/paced_network.h"
#include "ffi/runtime/network/thread_cpus.h"
#include "ffi/runtime/network/ucx/ucx.h"

namespace jax_ep {
namespace {

constexpr unsigned kDriverVersion = 12000;  // declares cuStreamWriteValue64 as below

// A copy to a GPU would wait for all launches that are queued before it, and these for the copy.
Status CheckQueues() {
  const char* const connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  if (connections == nullptr || std::strcmp(connections, "1") != 0) return {};
  return FailedPrecondition(
      "CUDA_DEVICE_MAX_CONNECTIONS is 1; expected 2 or more, or that it is not set. With one "
      "queue, "
      "what arrives over the network waits behind the kernels that wait for it");
}

using WriteValue = CUresult(CUstream, CUdeviceptr, cuuint64_t, unsigned);

// Copies what arrives in messages, in a stream that waits for no kernel. There a flag comes after
// all that was copied before it.
Status MakeUcx(const std::string& folder, int device, std::unique_ptr<Network>* network) {
  const CurrentDevice current(device);
  cudaStream_t stream = nullptr;  // lives as long as the process
  Status status = FromCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                           "making a stream for the network");
  WriteValue* write_value = nullptr;
  if (status.ok())
    status = FindDriverFunction("cuStreamWriteValue64", kDriverVersion, &write_value);
  if (!status.ok()) return status;
  UcxOptions options;
  options.folder = folder;
  options.copy_to_device = [stream](void* to, const void* from, size_t bytes) {
    cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    return FromCuda(error, "copying what has arrived over the network");
  };
  // A copy of 8 bytes would take the thread longer than UCX takes for the message.
  options.write_flag_to_device = [stream, write_value](void* to, uint64_t value) {
    const CUresult error = write_value(stream, reinterpret_cast<CUdeviceptr>(to), value,
                                       CU_STREAM_WRITE_VALUE_DEFAULT);
    return error == CUDA_SUCCESS ? Status{}
                                 : FailedPrecondition(
                                       "jax_ep: a flag of the network cannot be "
                                       "written: cuStreamWriteValue64 returns ",
                                       int(error));
  };
  options.await_flags = [stream] {
    return FromCuda(cudaStreamSynchronize(stream), "writing flags of the network");
  };
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
