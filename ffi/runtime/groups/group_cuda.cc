#include <algorithm>
#include <optional>
#include <utility>

#include "ffi/runtime/cuda/device_cuda.h"
#include "ffi/runtime/groups/group.h"

namespace jax_ep {
namespace {

Status EnablePeerAccess(int device, int peer) {
  int can_access = 0;
  static_cast<void>(cudaDeviceCanAccessPeer(&can_access, device, peer));
  if (!can_access) {
    return FailedPrecondition("jax_ep: GPU ", device, " cannot access the memory of GPU ", peer,
                              ", which the CUDA kernels need. nvidia-smi topo -p2p r shows which "
                              "GPUs can; otherwise set JAX_EP_IMPLEMENTATION=xla");
  }
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    static_cast<void>(cudaGetLastError());
    return {};
  }
  return OnGpu(device, FromCuda(error, "enabling peer access"));
}

}  // namespace

class Group::Change {
 public:
  explicit Change(Group& group) : group_(group) {
    std::unique_lock lock(group_.mutex_);
    group_.changed_.wait(lock, [this] { return !group_.is_changing_; });
    group_.is_changing_ = true;
  }
  ~Change() {
    const std::lock_guard lock(group_.mutex_);
    group_.is_changing_ = false;
    group_.changed_.notify_all();
  }

 private:
  Group& group_;
};

Group::Group(std::vector<int> devices, GroupKernels kernels, int64_t domain_size,
             std::unique_ptr<PeerGroup> peers, std::vector<PeerMemory*> memories)
    : devices_(std::move(devices)),
      kernels_(kernels),
      domain_size_(domain_size),
      peers_(std::move(peers)),
      memories_(std::move(memories)) {
  for (int device : devices_) {
    if (device != kRemoteDevice) local_devices_.push_back(device);
  }
  if (peers_) JoinPeers();
}

std::shared_ptr<Generation> Group::current() const {
  const std::lock_guard lock(mutex_);
  return generation_;
}

std::vector<std::shared_ptr<Generation>> Group::All() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Generation>> generations;
  for (const Retired& retired : retired_) generations.push_back(retired.generation);
  if (generation_) generations.push_back(generation_);
  return generations;
}

Status Group::Reserve(int64_t workspace_bytes, const std::vector<cudaStream_t>& streams) {
  const Change change(*this);
  // A call may have failed since this run was decided on.
  if (Status status = Failure(); !status.ok()) return status;
  FreeRetired(kSound);
  return HasRoom(workspace_bytes) ? Status{} : Grow(workspace_bytes, streams);
}

// Allocates a generation, in all processes or in none.
Status Group::Allocate(int64_t workspace_bytes, std::unique_ptr<Generation>* next,
                       bool* out_of_memory) {
  if (peers_) return AllocateShared(workspace_bytes, next, out_of_memory);
  *out_of_memory = false;
  if (Status status = AllocateOnce(); !status.ok()) return status;
  std::unique_ptr<GenerationRails> rails;
  if (Status status = MakeRails(&rails); !status.ok()) return status;
  return Generation::Allocate(members_, ++last_number_, workspace_bytes, next, out_of_memory,
                              nullptr, std::move(rails));
}

bool Group::HasNetwork() const { return domain_size_ != 0 && Networks::OfProcess().are_used(); }

// Makes none where domains are joined by loads and stores.
Status Group::MakeRails(std::unique_ptr<GenerationRails>* rails) const {
  if (!HasNetwork()) return {};
  std::vector<std::shared_ptr<DeviceNetwork>> networks;
  for (int device : devices_) {
    networks.emplace_back();
    if (device == kRemoteDevice) continue;
    Status status = Networks::OfProcess().Find(device, &networks.back());
    if (!status.ok()) return OnGpu(device, std::move(status));
  }
  const Domains domains(static_cast<int32_t>(devices_.size()), static_cast<int32_t>(domain_size_));
  *rails = std::make_unique<GenerationRails>(domains, networks);
  return {};
}

Status Group::Grow(int64_t workspace_bytes, const std::vector<cudaStream_t>& streams) {
  std::unique_ptr<Generation> next;
  bool out_of_memory = false;
  if (Status status = FlushRetired(); !status.ok()) return status;
  Status status = Allocate(workspace_bytes, &next, &out_of_memory);
  if (!out_of_memory || current() == nullptr || current()->workspace_bytes() == 0) {
    return status.ok() ? Begin(std::move(next), streams) : status;
  }
  // There is no room for both: the old workspaces are freed first.
  std::unique_ptr<Generation> without;
  status = Allocate(0, &without, &out_of_memory);
  if (status.ok()) status = Begin(std::move(without), streams);
  if (status.ok()) status = current()->AwaitBegin();
  if (status.ok()) status = FlushRetired();
  if (!status.ok()) return status;
  FreeRetired(kSound);
  if (peers_) {
    // A process that maps the memory of another one keeps it.
    std::vector<PeerGroup::Contribution> ignored;
    status = peers_->Gather(PeerGroup::Step::kUnmapped, "", {}, &ignored);
    if (!status.ok()) return status;
  }
  status = Allocate(workspace_bytes, &next, &out_of_memory);
  return status.ok() ? Begin(std::move(next), streams) : status;
}

// Agrees with the other processes that nobody puts into the memory of earlier generations any more.
Status Group::FlushRetired() {
  if (!peers_ || !HasNetwork() || current() == nullptr) return {};
  if (Status status = current()->AwaitBegin(); !status.ok()) return status;
  for (const auto& generation : All()) {
    if (generation == current()) continue;
    const Status flushed = generation->Flush();
    // A release ends what has failed.
    if (!flushed.ok() && !is_releasing_) Abort(flushed.message);
  }
  std::vector<PeerGroup::Contribution> ignored;
  Status status = peers_->Gather(PeerGroup::Step::kUnmapped, "", {}, &ignored);
  if (!status.ok()) return status;
  {
    const std::lock_guard lock(mutex_);
    for (Retired& retired : retired_) retired.is_flushed = true;
  }
  FreeRetired(kSound);
  return {};
}

Status Group::Begin(std::unique_ptr<Generation> next, const std::vector<cudaStream_t>& streams) {
  const std::shared_ptr<Generation> generation = std::move(next);
  Status status = generation->Start(kernels_.start_generation, streams, current().get());
  std::string abort_reason;
  {
    const std::lock_guard lock(mutex_);
    if (generation_) retired_.push_back({generation_, generation, !peers_ || !HasNetwork()});
    generation_ = generation;
    abort_reason = abort_reason_;
  }
  // Calls that the host has ended since the generation was allocated may follow in it.
  if (!abort_reason.empty()) generation->Abort(abort_reason);
  // Some ranks may have begun the generation without the others.
  if (!status.ok()) Abort(status.message);
  FreeRetired(kSound);
  return status;
}

int64_t Group::Release() {
  const Change change(*this);
  if (peers_) TellFailure(peers_->era());
  is_releasing_ = true;
  const int64_t freed = ReleaseNow();
  is_releasing_ = false;
  return freed;
}

int64_t Group::ReleaseNow() {
  std::shared_ptr<Generation> old = current();
  bool has_generation = old != nullptr;
  if (peers_ && !AgreeOnRelease(&has_generation)) return 0;
  {
    const std::lock_guard lock(mutex_);
    abort_reason_.clear();
  }
  if (!has_generation) return 0;
  std::unique_ptr<Generation> next;
  bool out_of_memory = false;
  Status status = Allocate(0, &next, &out_of_memory);
  std::vector<cudaStream_t> streams;
  for (const Member& member : members_) streams.push_back(member.starts);
  if (status.ok()) status = Begin(std::move(next), streams);
  if (status.ok()) status = current()->AwaitBegin();
  if (!status.ok()) {
    Abort(status.message);  // the next call reports it
    return 0;
  }
  const int64_t freed =
      old ? old->workspace_bytes() * static_cast<int64_t>(local_devices_.size()) : 0;
  old.reset();
  static_cast<void>(FlushRetired());  // the next call reports a failure
  FreeRetired(kAll);
  if (peers_) {
    // Memory is free when no process maps it any more. A failure is reported by the next call.
    std::vector<PeerGroup::Contribution> ignored;
    static_cast<void>(peers_->Gather(PeerGroup::Step::kUnmapped, "", {}, &ignored));
    memories_.front()->FreeUnused();
  }
  return freed;
}

void Group::Abort(const std::string& reason) {
  const uint64_t era = peers_ ? peers_->era() : 0;
  AbortLocal(reason);
  if (peers_) TellPeers(era, reason);
}

void Group::AbortLocal(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (abort_reason_.empty()) abort_reason_ = reason;
  }
  // Kernels of retired generations may still run.
  for (const auto& generation : All()) generation->Abort(reason);
}

bool Group::HasRoom(int64_t workspace_bytes) const {
  const std::shared_ptr<Generation> generation = current();
  return generation && generation->workspace_bytes() >= workspace_bytes;
}

// Asked for in every run: copies no list.
Status Group::Failure() const {
  const std::lock_guard lock(mutex_);
  for (const Retired& retired : retired_) {
    if (Status status = retired.generation->Failure(); !status.ok()) return status;
  }
  return generation_ ? generation_->Failure() : Status{};
}

void Group::PostReports(Mailbox& mailbox) {
  for (const auto& generation : All()) {
    if (peers_) AwaitReason(*generation);
    generation->PostReports(mailbox);
  }
}

void Group::Flush() {
  for (const auto& generation : All()) static_cast<void>(generation->Flush());
}

void Group::ShortenWarnings(double seconds) {
  for (const auto& generation : All()) generation->ShortenWarnings(seconds);
}

void Group::AbortLongWait(const char* why) {
  for (const auto& generation : All()) {
    if (const auto wait = generation->FindLongWait()) {
      Abort(Concatenate(why, ", and ", wait->description));
    }
  }
}

bool Group::HasUnused() const {
  const std::lock_guard lock(mutex_);
  return !retired_.empty();
}

void Group::FreeRetired(Freed freed) {
  std::vector<Retired> left, unused;
  {
    const std::lock_guard lock(mutex_);
    left = retired_;
  }
  // A generation that could not be started on a rank leaves that rank in an earlier one, until all
  // ranks have begun a later one.
  const auto begun = std::find_if(left.rbegin(), left.rend(),
                                  [](const Retired& retired) { return retired.next->HasBegun(); });
  // Its calls have ended: a failure is known.
  const auto keep = std::stable_partition(left.begin(), begun.base(), [&](const Retired& retired) {
    return freed == kSound && (!retired.is_flushed || !retired.generation->Failure().ok());
  });
  unused.assign(keep, begun.base());
  left.erase(keep, begun.base());
  const std::lock_guard lock(mutex_);
  retired_ = std::move(left);
}

Status Group::AllocateOnce() {
  if (!members_.empty()) return {};
  std::vector<Member> members;
  for (int device : devices_) {
    members.push_back({.device = device});
    if (device == kRemoteDevice) continue;
    const CurrentDevice current(device);
    Status status = OnGpu(device, current.status());
    for (int peer : local_devices_) {
      if (status.ok() && peer != device) status = EnablePeerAccess(device, peer);
    }
    if (status.ok()) status = OnGpu(device, kernels_.load());
    if (status.ok()) status = AllocateMember(&members.back());
    // The allocations so far are small, and the call may be tried again: they stay.
    if (!status.ok()) return status;
  }
  members_ = std::move(members);
  return {};
}

Status Group::AllocateMember(Member* member) const {
  cudaError_t error = cudaSuccess;
  for (cudaStream_t* stream : {&member->copies, &member->starts}) {
    if (error == cudaSuccess) error = cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking);
  }
  if (error == cudaSuccess) {
    error = cudaMalloc(reinterpret_cast<void**>(&member->control), sizeof(ControlBlock));
  }
  if (error == cudaSuccess) {
    error = cudaMemsetAsync(member->control, 0, sizeof(ControlBlock), member->copies);
  }
  if (error == cudaSuccess) error = cudaStreamSynchronize(member->copies);
  return OnGpu(member->device, FromCuda(error, "allocating a control block"));
}

}  // namespace jax_ep
