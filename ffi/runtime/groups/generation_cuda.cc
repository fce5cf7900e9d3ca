#include <atomic>
#include <cmath>
#include <cstdio>
#include <utility>

#include "ffi/runtime/cuda/device_cuda.h"
#include "ffi/runtime/groups/failure.h"
#include "ffi/runtime/groups/generation.h"

namespace jax_ep {

Generation::~Generation() {
  for (size_t rank : local_) {
    const CurrentDevice current(members_[rank].device);
    // The host's own copies, such as an abort word, may still be in flight.
    static_cast<void>(cudaStreamSynchronize(members_[rank].copies));
  }
  rails_.reset();               // it uses the memory
  for (size_t rank : local_) {  // GENERATION_FREE
    RankMemory& memory = memory_[rank];
    const CurrentDevice current(members_[rank].device);
    if (memory.begun != nullptr) static_cast<void>(cudaEventDestroy(memory.begun));
    if (memory.registered) static_cast<void>(cudaHostUnregister(memory.records.get()));
    if (shared_ == nullptr && memory.state != nullptr) static_cast<void>(cudaFree(memory.state));
  }
  if (shared_ != nullptr) {
    for (RankMemory& memory : memory_) shared_->Unmap(&memory.shared);
  }
  static_cast<void>(cudaGetLastError());
}

Status Generation::Start(StartKernel start, const std::vector<cudaStream_t>& streams,
                         const Generation* before) {
  Status first;
  for (size_t rank : local_) {  // GENERATION_START
    const Member& member = members_[rank];
    const CurrentDevice current(member.device);
    const cudaStream_t stream = streams[rank];
    cudaError_t error = cudaSuccess;
    if (before != nullptr) error = cudaStreamWaitEvent(stream, before->memory_[rank].begun, 0);
    Status status = FromCuda(error, "starting a generation");
    if (status.ok()) status = start(member.control, memory_[rank].state, stream);
    if (status.ok()) {
      status = FromCuda(cudaEventRecord(memory_[rank].begun, stream), "starting a generation");
    }
    status = OnGpu(member.device, std::move(status));
    if (first.ok()) first = status;
  }
  is_started_ = first.ok();
  return first;
}

bool Generation::HasBegun() const {
  if (!is_started_) return false;
  for (size_t rank : local_) {
    // A device that has failed runs no kernel any more.
    if (cudaEventQuery(memory_[rank].begun) == cudaErrorNotReady) return false;
  }
  return true;
}

Status Generation::AwaitBegin() const {
  for (size_t rank : local_) {
    const CurrentDevice current(members_[rank].device);
    Status status = OnGpu(members_[rank].device, FromCuda(cudaEventSynchronize(memory_[rank].begun),
                                                          "starting a generation"));
    if (!status.ok()) return status;
  }
  return {};
}

void Generation::Abort(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (!host_failure_.ok()) return;
    host_failure_ = DescribeHostAbort(reason);
  }
  for (size_t rank : local_) {  // HOST_ABORT
    const CurrentDevice current(members_[rank].device);
    uint32_t& word = memory_[rank].records->abort;
    word = static_cast<uint32_t>(Outcome::kHostAbort);
    // An error is left: the device has failed, and its own calls have ended.
    static_cast<void>(cudaMemcpyAsync(&inbox(rank)->abort, &word, sizeof word,
                                      cudaMemcpyHostToDevice, members_[rank].copies));
    static_cast<void>(cudaGetLastError());
  }
}

Status Generation::Failure() const {
  const std::lock_guard lock(mutex_);
  for (size_t rank : local_) {
    const AbortRecord& report = memory_[rank].records->report;
    if (IsPosted(report)) return Describe(report);
  }
  return host_failure_;
}

bool Generation::IsAborted() const {
  for (size_t rank : local_) {
    const Member& member = members_[rank];
    const CurrentDevice current(member.device);
    uint32_t& word = memory_[rank].records->abort_read;
    cudaError_t error = cudaMemcpyAsync(&word, &inbox(rank)->abort, sizeof word,
                                        cudaMemcpyDeviceToHost, member.copies);
    if (error == cudaSuccess) error = cudaStreamSynchronize(member.copies);
    if (error == cudaSuccess && word != 0) return true;
  }
  return false;
}

void Generation::PostReports(Mailbox& mailbox) {
  const std::lock_guard lock(mutex_);
  for (size_t rank : local_) {
    RankMemory& memory = memory_[rank];
    if (memory.posted || !IsPosted(memory.records->report)) continue;
    mailbox.Post(ToReport(memory.records->report));
    memory.posted = true;
  }
  if (host_failure_.ok() || host_failure_posted_) return;
  mailbox.Post({.phase = "host", .message = host_failure_.message});
  host_failure_posted_ = true;
}

void Generation::PrintWarnings() {
  const std::lock_guard lock(mutex_);
  PrintWarningsLocked();
}

void Generation::PrintWarningsLocked() {
  for (size_t rank : local_) {
    AbortRecord& warning = memory_[rank].records->warning;
    if (!IsPosted(warning)) continue;
    const std::string description = DescribeWaiting(warning, warning_seconds_);
    std::fprintf(stderr, "%s\n", description.c_str());
    memory_[rank].long_wait = {static_cast<int>(rank), warning.sequence, description};
    // Release: the device writes the next record only after this one was read.
    std::atomic_ref(warning.posted).store(0, std::memory_order_release);
  }
}

std::optional<Generation::LongWait> Generation::FindLongWait() {
  std::vector<LongWait> waits;
  {
    const std::lock_guard lock(mutex_);
    PrintWarningsLocked();
    for (size_t rank : local_) {
      if (memory_[rank].long_wait) waits.push_back(*memory_[rank].long_wait);
    }
  }
  for (const LongWait& wait : waits) {
    if (WaitsStill(wait)) return wait;
  }
  return {};
}

bool Generation::WaitsStill(const LongWait& wait) const {
  const Member& member = members_[wait.rank];
  const CurrentDevice current(member.device);
  Records& records = *memory_[static_cast<size_t>(wait.rank)].records;
  cudaError_t error = cudaMemcpyAsync(&records.claim, &member.control->claim, sizeof records.claim,
                                      cudaMemcpyDeviceToHost, member.copies);
  // After the claim, which is then a claim of this generation if the rank has begun no later one.
  if (error == cudaSuccess) {
    error = cudaMemcpyAsync(&records.generation, &member.control->generation,
                            sizeof records.generation, cudaMemcpyDeviceToHost, member.copies);
  }
  if (error == cudaSuccess) error = cudaStreamSynchronize(member.copies);
  if (error != cudaSuccess) return true;
  const uint64_t next = FirstSequence(number_) + (records.claim >> kClaimShift);
  return records.generation == number_ && next <= wait.sequence;
}

void Generation::ShortenWarnings(double seconds) {
  {
    const std::lock_guard lock(mutex_);
    if (seconds > warning_seconds_) return;
    warning_seconds_ = seconds;
  }
  for (size_t rank : local_) {
    const Member& member = members_[rank];
    const CurrentDevice current(member.device);
    uint64_t& warning_ns = memory_[rank].records->warning_ns;
    warning_ns = static_cast<uint64_t>(std::llround(seconds * 1e9));
    // The state first: a rank that begins this generation next copies it into the control block.
    for (uint64_t* to : {&memory_[rank].state->warning_ns, &member.control->warning_ns}) {
      static_cast<void>(cudaMemcpyAsync(to, &warning_ns, sizeof warning_ns, cudaMemcpyHostToDevice,
                                        member.copies));
    }
  }
}

}  // namespace jax_ep
