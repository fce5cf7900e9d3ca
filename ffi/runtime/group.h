// Groups: the devices of this process that exchange rows, their control blocks and workspaces.
//
// A control block is allocated once for each (device, group) and never freed, because captured
// CUDA graphs keep its address. Workspaces grow when a larger call comes, and can be released.
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

// Not safe to use from several threads; `Groups` is.
class Group {
 public:
  // Loads on the current device whatever will be launched there. A kernel that is loaded at its
  // first launch waits for its device, which may be waiting for a peer yet to be launched.
  using LoadKernels = Status (*)();

  // CUDA ordinals in rank order.
  explicit Group(std::vector<int> devices) : devices_(std::move(devices)) {}

  // Makes the workspaces at least this large. To be called while no device of the group is in the
  // middle of launching a program: it makes driver calls on all of them, and waits for them.
  Status Reserve(int64_t workspace_bytes, LoadKernels load_kernels);

  // Frees the workspaces and starts a new generation; returns the bytes freed.
  int64_t Release();

  int64_t workspace_bytes() const { return workspace_bytes_; }
  ControlBlock* control(int rank) const { return members_[rank].control; }

  // What went wrong in this generation, or OK.
  Status Failure() const;

  // Reports that were not yet posted go to the mailbox.
  void PostReports(Mailbox& mailbox);

  // Prints who has been waiting for whom, to stderr like XLA's own warnings.
  void PrintWarnings();

 private:
  // In host memory.
  struct Records {
    AbortRecord report;
    AbortRecord warning;
  };
  struct Member {
    ControlBlock* control = nullptr;
    Records* records = nullptr;
    Records* records_on_device = nullptr;  // the same, as kernels see it
    unsigned char* workspace = nullptr;
    bool posted = false;
  };

  Status AllocateOnce(LoadKernels load_kernels);
  Status AllocateMember(int device, Member* member) const;
  Status AllocateWorkspaces(int64_t bytes);
  Status StartGeneration();
  int64_t FreeWorkspaces();

  std::vector<int> devices_;
  std::vector<Member> members_;  // by rank; empty until everything else is there
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
