#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "ffi/device/transfer/hierarchical/layout.h"
#include "ffi/runtime/calls/workspace.h"
#include "ffi/runtime/cuda/device_cuda.h"
#include "ffi/runtime/groups/generation.h"
#include "ffi/runtime/settings.h"

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
                       PeerMemory* shared, std::unique_ptr<GenerationRails> rails)
    : members_(members),
      number_(number),
      workspace_bytes_(workspace_bytes),
      shared_(shared),
      memory_(members.size()),
      rails_(std::move(rails)) {
  for (size_t rank = 0; rank < members.size(); ++rank) {
    if (members[rank].device != kRemoteDevice) local_.push_back(rank);
  }
}

Inbox* Generation::inbox(size_t rank) const {
  if (memory_[rank].inbox != nullptr) return memory_[rank].inbox;
  return reinterpret_cast<Inbox*>(reinterpret_cast<unsigned char*>(memory_[rank].state) +
                                  kInboxOffset);
}

unsigned char* Generation::workspace(size_t rank) const {
  if (workspace_bytes_ == 0) return nullptr;
  return reinterpret_cast<unsigned char*>(memory_[rank].state) + kWorkspaceOffset;
}

Status Generation::Allocate(const std::vector<Member>& members, uint64_t number,
                            int64_t workspace_bytes, std::unique_ptr<Generation>* generation,
                            bool* out_of_memory, PeerMemory* shared,
                            std::unique_ptr<GenerationRails> rails) {
  *out_of_memory = false;
  if (number > kMaxGeneration) {
    return FailedPrecondition("jax_ep: ", kMaxGeneration,
                              " generations of these GPUs have begun in this process: workspaces "
                              "have grown or been released as often. Restart it, and call "
                              "jax_ep.release() less often");
  }
  std::unique_ptr<Generation> made(
      new Generation(members, number, workspace_bytes, shared, std::move(rails)));
  for (size_t rank : made->local_) {  // GENERATION_ALLOCATE
    if (Status status = made->AllocateRank(rank, out_of_memory); !status.ok()) return status;
  }
  if (shared == nullptr) {
    Status status;
    if (made->rails_) {
      std::vector<std::string> offers;
      for (size_t rank : made->local_) offers.push_back(made->rails_->Offer(rank));
      status = made->rails_->Connect(offers);
    }
    if (status.ok()) status = made->FillStates();
    if (status.ok()) status = made->ProbeNetwork([](int) { return "of this process"; });
    if (status.ok()) status = made->EndProbe();
    if (!status.ok()) return status;
  }
  *generation = std::move(made);
  return {};
}

Status Generation::Export(std::vector<Shared>* shared) const {
  for (size_t rank : local_) {
    Shared made;
    Status status = shared_->Export(memory_[rank].shared, &made.handle);
    if (!status.ok()) return OnGpu(members_[rank].device, status);
    if (rails_) made.offer = rails_->Offer(rank);
    shared->push_back(std::move(made));
  }
  return {};
}

// Whether a remote rank's memory is mapped here: a local rank is in its domain.
bool Generation::IsMapped(size_t rank) const {
  if (!rails_) return true;
  const Domains& domains = rails_->domains();
  const int domain = domains.Domain(static_cast<int>(rank));
  return std::any_of(local_.begin(), local_.end(), [&](size_t local) {
    return domains.Domain(static_cast<int>(local)) == domain;
  });
}

Status Generation::Import(uint64_t number, const std::vector<Shared>& shared) {
  number_ = number;
  std::vector<int> devices;
  for (size_t rank : local_) devices.push_back(members_[rank].device);
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    if (members_[rank].device != kRemoteDevice || !IsMapped(rank)) continue;
    RankMemory& memory = memory_[rank];
    const size_t bytes = kWorkspaceOffset + static_cast<size_t>(workspace_bytes_);
    const CurrentDevice current(devices[0]);
    Status status = shared_->Import(devices, shared[rank].handle, bytes, &memory.shared);
    if (!status.ok()) {
      return FailedPrecondition("the memory of rank ", rank, " cannot be used: ", status.message);
    }
    memory.state = static_cast<GenerationState*>(memory.shared.address);
    if (!rails_ || !rails_->kernels_put()) continue;
    if (status = ImportInbox(rank, shared[rank].offer); !status.ok()) return status;
  }
  Status status;
  if (rails_) {
    std::vector<std::string> offers;
    for (const Shared& of_rank : shared) offers.push_back(of_rank.offer);
    status = rails_->Connect(offers);
  }
  return status.ok() ? FillStates() : status;
}

// Finds the inbox of a remote rank, which the network has allocated, for a local one of its domain.
Status Generation::ImportInbox(size_t rank, const std::string& offer) {
  const Domains& domains = rails_->domains();
  const int domain = domains.Domain(static_cast<int>(rank));
  const auto local = std::find_if(local_.begin(), local_.end(), [&](size_t local) {
    return domains.Domain(static_cast<int>(local)) == domain;
  });
  return rails_->MapInbox(*local, rank, offer, &memory_[rank].inbox);
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
  status = FromCuda(error, "allocating a workspace");
  if (status.ok() && rails_) status = RegisterRank(rank, out_of_memory);
  return OnGpu(device, std::move(status));
}

Status Generation::RegisterRank(size_t rank, bool* out_of_memory) {
  if (rails_->kernels_put()) return RegisterSymmetric(rank, out_of_memory);
  const size_t bytes = kWorkspaceOffset + static_cast<size_t>(workspace_bytes_);
  const auto base = reinterpret_cast<uint64_t>(memory_[rank].state);
  const RankMemoryAddresses addresses = {
      .inbox = base + kInboxOffset,
      .rails = base + kWorkspaceOffset + static_cast<uint64_t>(RailsOffset())};
  return rails_->Register(rank, memory_[rank].state, bytes, addresses,
                          &memory_[rank].records->rail_requests);
}

// Where kernels put by themselves, the inbox and the rings are in the network's memory. That of the
// rings in the workspace is not used.
Status Generation::RegisterSymmetric(size_t rank, bool* out_of_memory) {
  constexpr size_t kInbox = RoundUp(sizeof(SymmetricRails));
  constexpr size_t kRings = kInbox + RoundUp(sizeof(Inbox));
  const auto ring_bytes = static_cast<size_t>(RailBytes(rails_->domains().count));
  const size_t bytes = kRings + (workspace_bytes_ > 0 ? ring_bytes : 0);
  void* allocated = nullptr;
  Status status = rails_->Allocate(rank, bytes, &allocated, out_of_memory);
  if (!status.ok()) return status;
  const auto base = reinterpret_cast<uint64_t>(allocated);
  memory_[rank].rails = static_cast<SymmetricRails*>(allocated);
  memory_[rank].inbox = reinterpret_cast<Inbox*>(base + kInbox);
  return rails_->Register(
      rank, allocated, bytes,
      {.inbox = base + kInbox, .rails = workspace_bytes_ > 0 ? base + kRings : 0}, nullptr);
}

Status Generation::ProbeNetwork(const RankNames& names) {
  if (!rails_ || workspace_bytes_ == 0) return {};  // without a workspace there are no rings
  Settings settings;
  if (Status status = ReadSettings(&settings); !status.ok()) return status;
  // A probe takes milliseconds; without a message for so long, the network does not work.
  const double seconds = std::min(static_cast<double>(settings.entry_deadline_ns) * 1e-9, 10.0);
  std::vector<RankMemoryCopies> copies(members_.size());
  for (size_t rank : local_) {
    const Member& member = members_[rank];
    const auto copy = [member](void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
      const CurrentDevice current(member.device);
      cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, member.copies);
      const cudaError_t ended = cudaStreamSynchronize(member.copies);
      if (error == cudaSuccess) error = ended;
      return OnGpu(member.device, FromCuda(error, "probing the network"));
    };
    copies[rank] = {
        .read =
            [copy](uint64_t from, void* to, size_t bytes) {
              return copy(to, reinterpret_cast<void*>(from), bytes, cudaMemcpyDeviceToHost);
            },
        .write =
            [copy](uint64_t to, const void* from, size_t bytes) {
              return copy(reinterpret_cast<void*>(to), from, bytes, cudaMemcpyHostToDevice);
            }};
  }
  return rails_->Probe(copies, names, number_, seconds);
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
    if (rails_) {
      SetDomainPeers(&state, rails_->domains().size);
      state.rail_requests = &on_device->rail_requests;
    }
    SymmetricRails rails = {};
    if (rails_ && rails_->kernels_put()) {
      rails = rails_->Symmetric(rank);
      state.symmetric_rails = memory_[rank].rails;
      if (error == cudaSuccess) {
        error = cudaMemcpyAsync(memory_[rank].rails, &rails, sizeof rails, cudaMemcpyHostToDevice,
                                member.copies);
      }
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

}  // namespace jax_ep
