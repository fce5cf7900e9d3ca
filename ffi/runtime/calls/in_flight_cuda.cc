#include <algorithm>

#include "ffi/runtime/calls/in_flight.h"
#include "ffi/runtime/cuda/device_cuda.h"

namespace jax_ep {

InFlightCalls& InFlightCalls::OfProcess() {
  static auto& calls = *new InFlightCalls;
  return calls;
}

Status InFlightCalls::FindStream(int device, int64_t lane, cudaStream_t* stream) {
  const std::lock_guard lock(mutex_);
  cudaStream_t& found = streams_[{device, lane}];
  if (found == nullptr) {
    int least = 0, greatest = 0;
    cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (error == cudaSuccess) {
      error = cudaStreamCreateWithPriority(&found, cudaStreamNonBlocking, greatest);
    }
    if (error != cudaSuccess) return FromCuda(error, "creating the stream of a lane");
  }
  *stream = found;
  return {};
}

Status InFlightCalls::Fork(int device, int64_t lane, cudaStream_t from, cudaStream_t* stream) {
  if (Status status = FindStream(device, lane, stream); !status.ok()) return status;
  const std::lock_guard lock(mutex_);
  cudaEvent_t begun = nullptr;
  if (Status status = TakeEvent(device, &begun); !status.ok()) return status;
  // A wait is for the record before it, so the event can be recorded anew at once.
  cudaError_t error = cudaEventRecord(begun, from);
  if (error == cudaSuccess) error = cudaStreamWaitEvent(*stream, begun, 0);
  idle_events_[device].push_back(begun);
  return FromCuda(error, "starting a call in flight");
}

Status InFlightCalls::Add(int device, cudaStream_t stream, const BufferAddresses& buffers) {
  const std::lock_guard lock(mutex_);
  cudaEvent_t ended = nullptr;
  if (Status status = TakeEvent(device, &ended); !status.ok()) return status;
  if (const cudaError_t error = cudaEventRecord(ended, stream); error != cudaSuccess) {
    idle_events_[device].push_back(ended);
    return FromCuda(error, "recording a call in flight");
  }
  const auto [call, is_new] = calls_.try_emplace(Key{device, buffers.at(0)}, Call{});
  if (!is_new) idle_events_[device].push_back(call->second.ended);  // it was never joined
  call->second = {buffers, ended};
  return {};
}

Status InFlightCalls::Join(int device, cudaStream_t stream, const BufferAddresses& buffers) {
  const std::lock_guard lock(mutex_);
  const auto found = calls_.find(Key{device, buffers.at(0)});
  if (found == calls_.end()) {
    return FailedPrecondition(
        "no call in flight has these results: it has been joined before, or XLA has copied them in "
        "flight, as it does between programs and for the next iteration of a loop. Call start and "
        "done once each, in the same jit-compiled function and the same iteration");
  }
  const Call call = found->second;
  calls_.erase(found);
  const cudaError_t error = cudaStreamWaitEvent(stream, call.ended, 0);
  idle_events_[device].push_back(call.ended);
  if (error != cudaSuccess) return FromCuda(error, "joining a call in flight");
  if (call.buffers != buffers) {
    const auto [started, joined] = std::ranges::mismatch(call.buffers, buffers);
    return FailedPrecondition("XLA has copied buffer ", started - call.buffers.begin(),
                              " of a call in flight, whose memory may be in use for something "
                              "else. Call start and done in the same jit-compiled function");
  }
  return {};
}

Status InFlightCalls::TakeEvent(int device, cudaEvent_t* event) {
  std::vector<cudaEvent_t>& idle = idle_events_[device];
  if (!idle.empty()) {
    *event = idle.back();
    idle.pop_back();
    return {};
  }
  return FromCuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "creating an event");
}

}  // namespace jax_ep
