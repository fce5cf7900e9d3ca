// A group: the devices of this process that exchange rows, with their control blocks and
// workspaces.
//
// A control block is allocated once for each (device, group) and never freed, because captured
// CUDA graphs keep its address. Workspaces grow for larger calls, and can be released.
#ifndef JAX_EP_RUNTIME_GROUP_H_
#define JAX_EP_RUNTIME_GROUP_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "ffi/device/protocol/control_block.h"
#include "ffi/runtime/mailbox.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// Not thread-safe; `Groups` is.
class Group {
 public:
  // Loads all kernels on the current device. With lazy loading, the first launch of a kernel
  // synchronizes with the device, where another kernel may be waiting for this very launch.
  using LoadKernels = Status (*)();

  // CUDA ordinals in rank order.
  explicit Group(std::vector<int> devices) : devices_(std::move(devices)) {}

  // Makes the workspaces at least this large. Call it while no device of the group is launching a
  // program: it makes driver calls on all of them, and synchronizes them.
  Status Reserve(int64_t workspace_bytes, LoadKernels load_kernels);

  // Frees the workspaces and starts a new generation; returns the bytes freed.
  int64_t Release();

  int64_t workspace_bytes() const { return workspace_bytes_; }
  ControlBlock* control(int rank) const { return members_[rank].control; }

  // The first failure of this generation, or OK.
  Status Failure() const;

  // Posts new reports to the mailbox.
  void PostReports(Mailbox& mailbox);

  // Prints which rank has been waiting for which, to stderr like XLA's own warnings.
  void PrintWarnings();

 private:
  // Host memory that the device writes.
  struct Records {
    AbortRecord report;
    AbortRecord warning;
  };
  struct Member {
    ControlBlock* control = nullptr;
    Records* records = nullptr;
    Records* records_on_device = nullptr;  // the address that kernels use
    unsigned char* workspace = nullptr;
    bool posted = false;
  };

  Status AllocateOnce(LoadKernels load_kernels);
  Status AllocateMember(int device, Member* member) const;
  Status AllocateWorkspaces(int64_t bytes);
  Status StartGeneration();
  int64_t FreeWorkspaces();

  std::vector<int> devices_;
  std::vector<Member> members_;  // indexed by rank; empty until all are allocated
  int64_t workspace_bytes_ = 0;
  uint64_t generation_ = 0;
  double warning_seconds_ = 0;
};

// The groups of this process.
class Groups {
 public:
  // Never destroyed: threads of XLA may outlive static destructors.
  static Groups& OfProcess();

  // The group of these devices in rank order. A group lives until the process ends.
  Group* Find(const std::vector<int>& devices);

  Status Reserve(Group& group, int64_t workspace_bytes, Group::LoadKernels load_kernels);
  bool HasRoom(const Group& group, int64_t workspace_bytes);
  Status Failure(const Group& group);
  int64_t Release();
  void PostReports(Mailbox& mailbox);

 private:
  void Watch();

  std::once_flag watching_;
  std::mutex mutex_;
  std::map<std::vector<int>, std::unique_ptr<Group>> groups_;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_GROUP_H_
