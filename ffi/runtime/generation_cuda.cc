#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <new>

#include "ffi/runtime/device_cuda.h"
#include "ffi/runtime/failure.h"
#include "ffi/runtime/generation.h"
#include "ffi/runtime/settings.h"
#include "ffi/runtime/workspace.h"

namespace jax_ep {
namespace {

constexpr size_t RoundUp(size_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

// The offsets in a rank's allocation.
constexpr size_t kInboxOffset = RoundUp(sizeof(GenerationState));
constexpr size_t kWorkspaceOffset = kInboxOffset + RoundUp(sizeof(Inbox));

Status OutOfMemory(int64_t bytes, int device) {
  size_t free = 0, total = 0;
  static_cast<void>(cudaGetLastError());
  static_cast<void>(cudaMemGetInfo(&free, &total));
  return FailedPrecondition(
      "jax_ep: out of memory on GPU ", device, ": the workspace of a rank takes ", bytes,
      " bytes outside JAX's pool, and ", free, " of ", total,
      " are free. Let JAX reserve less (XLA_PYTHON_CLIENT_MEM_FRACTION, 0.75 by default), or "
      "dispatch fewer tokens at once; jax_ep.memory() says what a call needs, by buffer");
}

}  // namespace

Generation::Generation(const std::vector<Member>& members, uint64_t number, int64_t workspace_bytes,
                       PeerMemory* shared)
    : members_(members),
      number_(number),
      workspace_bytes_(workspace_bytes),
      shared_(shared),
      memory_(members.size()) {
  for (size_t rank = 0; rank < members.size(); ++rank) {
    if (members[rank].device != kRemoteDevice) local_.push_back(rank);
  }
}

Inbox* Generation::inbox(size_t rank) const {
  return reinterpret_cast<Inbox*>(reinterpret_cast<unsigned char*>(memory_[rank].state) +
                                  kInboxOffset);
}

unsigned char* Generation::workspace(size_t rank) const {
  if (workspace_bytes_ == 0) return nullptr;
  return reinterpret_cast<unsigned char*>(memory_[rank].state) + kWorkspaceOffset;
}

Status Generation::Allocate(const std::vector<Member>& members, uint64_t number,
                            int64_t workspace_bytes, std::unique_ptr<Generation>* generation,
                            bool* out_of_memory, PeerMemory* shared) {
  *out_of_memory = false;
  if (number > kMaxGeneration) {
    return FailedPrecondition("jax_ep: ", kMaxGeneration,
                              " generations of these GPUs have begun in this process: workspaces "
                              "have grown or been released as often. Restart it, and call "
                              "jax_ep.release() less often");
  }
  std::unique_ptr<Generation> made(new Generation(members, number, workspace_bytes, shared));
  for (size_t rank : made->local_) {  // GENERATION_ALLOCATE
    if (Status status = made->AllocateRank(rank, out_of_memory); !status.ok()) return status;
  }
  if (shared == nullptr) {
    if (Status status = made->FillStates(); !status.ok()) return status;
  }
  *generation = std::move(made);
  return {};
}

Status Generation::Export(std::vector<UniqueFd>* descriptors) const {
  for (size_t rank : local_) {
    UniqueFd descriptor;
    Status status = shared_->Export(memory_[rank].shared, &descriptor);
    if (!status.ok()) return OnGpu(members_[rank].device, status);
    descriptors->push_back(std::move(descriptor));
  }
  return {};
}

Status Generation::Import(uint64_t number, const std::vector<UniqueFd>& descriptors) {
  number_ = number;
  std::vector<int> devices;
  for (size_t rank : local_) devices.push_back(members_[rank].device);
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    if (members_[rank].device != kRemoteDevice) continue;
    RankMemory& memory = memory_[rank];
    const size_t bytes = kWorkspaceOffset + static_cast<size_t>(workspace_bytes_);
    const CurrentDevice current(devices[0]);
    Status status = shared_->Import(devices, descriptors[rank].get(), bytes, &memory.shared);
    if (!status.ok()) {
      return FailedPrecondition("the memory of rank ", rank, " cannot be used: ", status.message);
    }
    memory.state = static_cast<GenerationState*>(memory.shared.address);
  }
  return FillStates();
}

// Allocates the memory that peers write.
Status Generation::AllocateState(size_t rank, bool* out_of_memory) {
  RankMemory& memory = memory_[rank];
  const size_t bytes = kWorkspaceOffset + static_cast<size_t>(workspace_bytes_);
  if (shared_ == nullptr) {
    const cudaError_t error = cudaMalloc(reinterpret_cast<void**>(&memory.state), bytes);
    if (error != cudaSuccess) memory.state = nullptr;
    *out_of_memory = error == cudaErrorMemoryAllocation;
    return FromCuda(error, "allocating a workspace");
  }
  std::vector<int> devices = {members_[rank].device};
  for (size_t other : local_) {
    if (other != rank) devices.push_back(members_[other].device);
  }
  Status status = shared_->Allocate(devices, bytes, &memory.shared, out_of_memory);
  memory.state = static_cast<GenerationState*>(memory.shared.address);
  return status;
}

Status Generation::AllocateRank(size_t rank, bool* out_of_memory) {
  RankMemory& memory = memory_[rank];
  const int device = members_[rank].device;
  const CurrentDevice current(device);
  Status status = AllocateState(rank, out_of_memory);
  if (*out_of_memory) return OutOfMemory(workspace_bytes_, device);
  if (!status.ok()) return OnGpu(device, status);
  // Not cudaHostAlloc: the driver would free it at exit, while the watching thread reads it.
  memory.records = std::make_unique<Records>();
  cudaError_t error = cudaHostRegister(memory.records.get(), sizeof(Records),
                                       cudaHostRegisterPortable | cudaHostRegisterMapped);
  memory.registered = error == cudaSuccess;
  if (error == cudaSuccess) error = cudaEventCreateWithFlags(&memory.begun, cudaEventDisableTiming);
  return OnGpu(device, FromCuda(error, "allocating a workspace"));
}

// Writes the states and zeroes the inboxes, which nobody uses yet.
Status Generation::FillStates() {
  Settings settings;
  if (Status status = ReadSettings(&settings); !status.ok()) return status;
  warning_seconds_ = static_cast<double>(settings.warning_ns) * 1e-9;
  for (size_t rank : local_) {
    const Member& member = members_[rank];
    const CurrentDevice current(member.device);
    Records* on_device = nullptr;
    cudaError_t error = cudaHostGetDevicePointer(reinterpret_cast<void**>(&on_device),
                                                 memory_[rank].records.get(), 0);
    GenerationState state = {};
    state.generation = number_;
    state.rank = static_cast<int32_t>(rank);
    state.num_ranks = static_cast<int32_t>(members_.size());
    SetAllPeers(&state);
    state.inbox = inbox(rank);
    state.workspace = workspace(rank);
    state.workspace_bytes = static_cast<uint64_t>(workspace_bytes_);
    state.entry_deadline_ns = settings.entry_deadline_ns;
    state.progress_deadline_ns = settings.progress_deadline_ns;
    state.warning_ns = settings.warning_ns;
    state.max_delay_ns = settings.max_delay_ns;
    state.report = &on_device->report;
    state.warning = &on_device->warning;
    for (size_t peer = 0; peer < members_.size(); ++peer) {
      state.peers[peer] = {inbox(peer), workspace(peer)};
    }
    // XLA's streams do not wait for the default stream, nor it for them. So this stream is waited
    // for, and Start comes later.
    if (error == cudaSuccess) {
      error = cudaMemsetAsync(inbox(rank), 0, sizeof(Inbox), member.copies);
    }
    if (error == cudaSuccess) {
      error = cudaMemcpyAsync(memory_[rank].state, &state, sizeof state, cudaMemcpyHostToDevice,
                              member.copies);
    }
    // Also after an error: the memory may be freed next.
    const cudaError_t ended = cudaStreamSynchronize(member.copies);
    if (error == cudaSuccess) error = ended;
    Status status = OnGpu(member.device, FromCuda(error, "preparing a generation"));
    if (!status.ok()) return status;
  }
  return {};
}

Generation::~Generation() {
  for (size_t rank : local_) {  // GENERATION_FREE
    RankMemory& memory = memory_[rank];
    const CurrentDevice current(members_[rank].device);
    // The host's own copies, such as an abort word, may still be in flight.
    static_cast<void>(cudaStreamSynchronize(members_[rank].copies));
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
