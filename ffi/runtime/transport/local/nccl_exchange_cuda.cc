// The exchange of identities by NCCL, on the communicator that XLA lends.
#include <cuda_runtime_api.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "ffi/runtime/cuda/device_cuda.h"
#include "ffi/runtime/cuda/nccl.h"
#include "ffi/runtime/settings.h"
#include "ffi/runtime/transport/local/cuda_transport.h"

namespace jax_ep {
namespace {

using Clock = std::chrono::steady_clock;

// NCCL's interface, as far as it is used. It has been the same since NCCL 2.14.
constexpr int kNcclSuccess = 0, kNcclInProgress = 7, kNcclInt8 = 0;
struct Nccl {
  int (*group_start)();
  int (*group_end)();
  int (*all_gather)(const void* send, void* receive, size_t count, int type, void* communicator,
                    cudaStream_t stream);
  int (*get_async_error)(void* communicator, int* error);
  const char* (*get_error_string)(int error);

  static Status Find(Nccl* nccl) {
    const auto find = [](const char* name, auto* function) {
      void* const found = FindNcclFunction(name);
      std::memcpy(function, &found, sizeof found);
      return found != nullptr;
    };
    if (find("ncclGroupStart", &nccl->group_start) && find("ncclGroupEnd", &nccl->group_end) &&
        find("ncclAllGather", &nccl->all_gather) &&
        find("ncclCommGetAsyncError", &nccl->get_async_error) &&
        find("ncclGetErrorString", &nccl->get_error_string)) {
      return {};
    }
    return FailedPrecondition("the loaded libnccl.so.2 lacks a function; it is older than 2.14");
  }
};

// A device's part: what it sends and receives, and the stream.
struct Part {
  Exchange::Endpoint endpoint;
  Identity* memory = nullptr;  // on the device: the own identity, then all
  cudaStream_t stream = nullptr;

  Status Allocate(const Identity& self, size_t num_devices) {
    const CurrentDevice current(endpoint.device);
    cudaError_t error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) {
      error = cudaMalloc(reinterpret_cast<void**>(&memory), (1 + num_devices) * sizeof(Identity));
    }
    if (error == cudaSuccess) {
      error = cudaMemcpyAsync(memory, &self, sizeof self, cudaMemcpyHostToDevice, stream);
    }
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    return OnGpu(endpoint.device, FromCuda(error, "preparing the exchange of identities"));
  }

  void Free() {
    const CurrentDevice current(endpoint.device);
    static_cast<void>(cudaFree(memory));
    if (stream != nullptr) static_cast<void>(cudaStreamDestroy(stream));
  }
};

// Waits for the other processes, of which nothing is known yet.
class Deadline {
 public:
  Deadline(const Identity& self, const Settings& settings)
      : self_(self),
        settings_(settings),
        warning_(start_ + std::chrono::nanoseconds(settings.warning_ns)),
        deadline_(start_ + std::chrono::nanoseconds(settings.entry_deadline_ns)) {}

  // Waits for a moment. Fails at the deadline.
  Status Wait() {
    const auto now = Clock::now();
    if (now >= deadline_) {
      return FailedPrecondition(
          "not all of them have made this call within the deadline "
          "(JAX_EP_ENTRY_TIMEOUT_S). Do all run the same program?");
    }
    if (now >= warning_) {
      warning_ = deadline_;
      std::fprintf(stderr,
                   "jax_ep: a process (pid %lld on %s) has waited %g s for others of its mesh to "
                   "exchange identities and goes on waiting. Are they still compiling, do they run "
                   "another program, or has one died?\n",
                   static_cast<long long>(self_.pid), self_.host,
                   static_cast<double>(settings_.warning_ns) * 1e-9);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    return {};
  }

 private:
  const Identity self_;
  const Settings settings_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point warning_;
  const Clock::time_point deadline_;
};

class NcclExchange : public Exchange {
 public:
  Status AllGather(const std::vector<Endpoint>& local, const Identity& self, size_t num_devices,
                   std::vector<Identity>* identities) override {
    Nccl nccl = {};
    Settings settings;
    Status status = Nccl::Find(&nccl);
    if (status.ok()) status = ReadSettings(&settings);
    Deadline deadline(self, settings);
    std::vector<Part> parts;
    for (const Endpoint& endpoint : local) {
      if (!status.ok()) break;
      parts.push_back({endpoint});
      status = parts.back().Allocate(endpoint.IdentityIn(self), num_devices);
    }
    if (status.ok()) status = Gather(nccl, parts, &deadline);
    // After an error NCCL may still use the memory.
    if (!status.ok()) {
      return FailedPrecondition(
          "jax_ep: the processes of the mesh could not exchange identities "
          "by NCCL: ",
          status.message);
    }
    identities->resize(num_devices);
    {
      const CurrentDevice current(parts[0].endpoint.device);
      status = FromCuda(cudaMemcpy(identities->data(), parts[0].memory + 1,
                                   num_devices * sizeof(Identity), cudaMemcpyDeviceToHost),
                        "reading the identities");
    }
    for (Part& part : parts) part.Free();
    return status;
  }

 private:
  static Status Gather(const Nccl& nccl, const std::vector<Part>& parts, Deadline* deadline) {
    int error = nccl.group_start();
    for (const Part& part : parts) {
      if (error != kNcclSuccess && error != kNcclInProgress) break;
      const CurrentDevice current(part.endpoint.device);
      error = nccl.all_gather(part.memory, part.memory + 1, sizeof(Identity), kNcclInt8,
                              part.endpoint.communicator, part.stream);
    }
    const int ended = nccl.group_end();
    if (error == kNcclSuccess || error == kNcclInProgress) error = ended;
    if (error == kNcclSuccess) error = AsyncError(nccl, parts);
    // XLA's communicators may be non-blocking: a call returns before NCCL has connected.
    while (error == kNcclInProgress) {
      error = AsyncError(nccl, parts);
      if (error != kNcclInProgress) break;
      if (Status status = deadline->Wait(); !status.ok()) return status;
    }
    if (error != kNcclSuccess) return FailedPrecondition(nccl.get_error_string(error));
    for (const Part& part : parts) {
      const CurrentDevice current(part.endpoint.device);
      cudaError_t state;
      while ((state = cudaStreamQuery(part.stream)) == cudaErrorNotReady) {
        // NCCL notices some deaths: those at the other end of a network connection.
        error = AsyncError(nccl, parts);
        if (error != kNcclSuccess) return FailedPrecondition(nccl.get_error_string(error));
        if (Status status = deadline->Wait(); !status.ok()) return status;
      }
      Status status = OnGpu(part.endpoint.device, FromCuda(state, "exchanging identities"));
      if (!status.ok()) return status;
    }
    return {};
  }

  // Whether a communicator has failed or is in progress.
  static int AsyncError(const Nccl& nccl, const std::vector<Part>& parts) {
    int found = kNcclSuccess;
    for (const Part& part : parts) {
      int state = kNcclSuccess;
      const int error = nccl.get_async_error(part.endpoint.communicator, &state);
      if (error != kNcclSuccess) return error;
      if (state != kNcclSuccess && state != kNcclInProgress) return state;
      if (state != kNcclSuccess) found = state;
    }
    return found;
  }
};

}  // namespace

Exchange* CudaExchange() {
  static auto* const exchange = new NcclExchange;
  return exchange;
}

}  // namespace jax_ep
