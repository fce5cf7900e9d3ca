#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <thread>

#include "ffi/runtime/device_cuda.h"
#include "ffi/runtime/failure.h"
#include "ffi/runtime/group.h"
#include "ffi/runtime/settings.h"

namespace jax_ep {
namespace {

Status OnGpu(int device, const Status& status) {
  if (status.ok()) return status;
  return {status.code, Concatenate("jax_ep: GPU ", device, ": ", status.message)};
}

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

template <typename T>
cudaError_t Allocate(T** address, size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(address), bytes);
}

Status OutOfMemory(int64_t bytes, int device) {
  size_t free = 0, total = 0;
  static_cast<void>(cudaGetLastError());
  static_cast<void>(cudaMemGetInfo(&free, &total));
  return FailedPrecondition(
      "jax_ep: out of memory on GPU ", device, ": the workspace of a rank takes ", bytes,
      " bytes outside JAX's pool, and ", free, " of ", total,
      " are free. Let JAX reserve less (XLA_PYTHON_CLIENT_MEM_FRACTION, 0.75 by default), or "
      "dispatch "
      "fewer tokens at once; jax_ep.workspace_nbytes() says what a call needs, by buffer");
}

}  // namespace

Status Group::Reserve(int64_t workspace_bytes, LoadKernels load_kernels) {
  if (Status status = AllocateOnce(load_kernels); !status.ok()) return status;
  if (workspace_bytes <= workspace_bytes_) return {};
  FreeWorkspaces();
  Status status = AllocateWorkspaces(workspace_bytes);
  // Also after a failure: control blocks must not point to freed memory.
  Status started = StartGeneration();
  return status.ok() ? started : status;
}

int64_t Group::Release() {
  if (members_.empty()) return 0;
  const int64_t freed = FreeWorkspaces();
  static_cast<void>(StartGeneration());  // the next call reports an error
  return freed;
}

Status Group::Failure() const {
  for (const Member& member : members_) {
    if (IsPosted(member.records->report)) return Describe(member.records->report);
  }
  return {};
}

void Group::PostReports(Mailbox& mailbox) {
  for (Member& member : members_) {
    if (member.posted || !IsPosted(member.records->report)) continue;
    mailbox.Post(ToReport(member.records->report));
    member.posted = true;
  }
}

void Group::PrintWarnings() {
  for (Member& member : members_) {
    AbortRecord& warning = member.records->warning;
    if (!IsPosted(warning)) continue;
    std::fprintf(stderr, "%s\n", DescribeWaiting(warning, warning_seconds_).c_str());
    // Release: the device writes the next record only after this one was read.
    std::atomic_ref(warning.posted).store(0, std::memory_order_release);
  }
}

Status Group::AllocateOnce(LoadKernels load_kernels) {
  if (!members_.empty()) return {};
  std::vector<Member> members(devices_.size());
  for (size_t rank = 0; rank < devices_.size(); ++rank) {
    const int device = devices_[rank];
    const CurrentDevice current(device);
    Status status = OnGpu(device, current.status());
    for (int peer : devices_) {
      if (status.ok() && peer != device) status = EnablePeerAccess(device, peer);
    }
    if (status.ok()) status = OnGpu(device, load_kernels());
    if (status.ok()) status = AllocateMember(device, &members[rank]);
    // The allocations so far are small, and the call may be tried again: they stay.
    if (!status.ok()) return status;
  }
  members_ = std::move(members);
  return {};
}

Status Group::AllocateMember(int device, Member* member) const {
  cudaError_t error = Allocate(&member->control, sizeof(ControlBlock));
  if (error == cudaSuccess) {
    // Not cudaHostAlloc: the driver would free it at exit, while the watching thread reads it.
    member->records = new Records{};
    error = cudaHostRegister(member->records, sizeof(Records),
                             cudaHostRegisterPortable | cudaHostRegisterMapped);
  }
  if (error == cudaSuccess) {
    error = cudaHostGetDevicePointer(reinterpret_cast<void**>(&member->records_on_device),
                                     member->records, 0);
  }
  if (error == cudaErrorMemoryAllocation) return OutOfMemory(sizeof(ControlBlock), device);
  return OnGpu(device, FromCuda(error, "allocating a control block"));
}

Status Group::AllocateWorkspaces(int64_t bytes) {
  for (size_t rank = 0; rank < devices_.size(); ++rank) {
    const int device = devices_[rank];
    const CurrentDevice current(device);
    const cudaError_t error = Allocate(&members_[rank].workspace, bytes);
    if (error == cudaSuccess) continue;
    members_[rank].workspace = nullptr;
    Status status = error == cudaErrorMemoryAllocation
                        ? OutOfMemory(bytes, device)
                        : OnGpu(device, FromCuda(error, "allocating a workspace"));
    FreeWorkspaces();
    return status;
  }
  workspace_bytes_ = bytes;
  return {};
}

// Zeroes all state that kernels write, on all ranks, before any of them launches again.
Status Group::StartGeneration() {
  ++generation_;
  Settings settings;
  if (Status status = ReadSettings(&settings); !status.ok()) {
    workspace_bytes_ = 0;  // the next call tries again
    return status;
  }
  warning_seconds_ = static_cast<double>(settings.warning_ns) * 1e-9;
  for (size_t rank = 0; rank < devices_.size(); ++rank) {
    const int device = devices_[rank];
    Member& member = members_[rank];
    *member.records = {};
    member.posted = false;
    auto block = std::make_unique<ControlBlock>();
    block->generation = generation_;
    block->rank = static_cast<int32_t>(rank);
    block->num_ranks = static_cast<int32_t>(devices_.size());
    block->workspace_bytes = static_cast<uint64_t>(workspace_bytes_);
    block->entry_deadline_ns = settings.entry_deadline_ns;
    block->progress_deadline_ns = settings.progress_deadline_ns;
    block->warning_ns = settings.warning_ns;
    block->max_delay_ns = settings.max_delay_ns;
    block->report = &member.records_on_device->report;
    block->warning = &member.records_on_device->warning;
    for (size_t peer = 0; peer < devices_.size(); ++peer) {
      block->peers[peer] = {members_[peer].control, members_[peer].workspace};
    }
    const CurrentDevice current(device);
    cudaError_t error =
        cudaMemcpy(member.control, block.get(), sizeof *block, cudaMemcpyHostToDevice);
    // XLA's streams do not wait for the default stream, which has the copy.
    if (error == cudaSuccess) error = cudaDeviceSynchronize();
    Status status = OnGpu(device, FromCuda(error, "starting a generation"));
    if (!status.ok()) return status;
  }
  return {};
}

int64_t Group::FreeWorkspaces() {
  // Synchronizes all devices first: a peer may still store to memory that is freed next.
  for (int device : devices_) {
    const CurrentDevice current(device);
    static_cast<void>(cudaDeviceSynchronize());
  }
  int64_t freed = 0;
  for (size_t rank = 0; rank < devices_.size(); ++rank) {
    Member& member = members_[rank];
    if (member.workspace == nullptr) continue;
    const CurrentDevice current(devices_[rank]);
    static_cast<void>(cudaFree(member.workspace));
    member.workspace = nullptr;
    freed += workspace_bytes_;
  }
  workspace_bytes_ = 0;
  return freed;
}

Groups& Groups::OfProcess() {
  static Groups* const groups = new Groups;
  return *groups;
}

Group* Groups::Find(const std::vector<int>& devices) {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Group>& group = groups_[devices];
  if (!group) group = std::make_unique<Group>(devices);
  return group.get();
}

Status Groups::Reserve(Group& group, int64_t workspace_bytes, Group::LoadKernels load_kernels) {
  std::call_once(watching_, [this] { std::thread([this] { Watch(); }).detach(); });
  const std::lock_guard lock(mutex_);
  return group.Reserve(workspace_bytes, load_kernels);
}

bool Groups::HasRoom(const Group& group, int64_t workspace_bytes) {
  const std::lock_guard lock(mutex_);
  return group.workspace_bytes() >= workspace_bytes;
}

Status Groups::Failure(const Group& group) {
  const std::lock_guard lock(mutex_);
  return group.Failure();
}

int64_t Groups::Release() {
  const std::lock_guard lock(mutex_);
  int64_t freed = 0;
  for (auto& [devices, group] : groups_) freed += group->Release();
  return freed;
}

void Groups::Watch() {
  while (true) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    const std::lock_guard lock(mutex_);
    for (auto& [devices, group] : groups_) group->PrintWarnings();
  }
}

void Groups::PostReports(Mailbox& mailbox) {
  const std::lock_guard lock(mutex_);
  for (auto& [devices, group] : groups_) group->PostReports(mailbox);
}

}  // namespace jax_ep
