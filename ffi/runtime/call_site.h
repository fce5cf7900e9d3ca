// A call site: one custom call of one program. Each device that executes it has a rank in a group.
#ifndef JAX_EP_RUNTIME_CALL_SITE_H_
#define JAX_EP_RUNTIME_CALL_SITE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "ffi/runtime/group.h"
#include "ffi/runtime/rendezvous.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

class CallSite {
 public:
  // `groups` has the logical device ids of each group, in rank order. Together they are 0 to the
  // mesh's size - 1.
  CallSite(std::vector<std::vector<int64_t>> groups, Group::LoadKernels load_kernels);

  // Unique in the process.
  uint64_t id() const { return id_; }

  // The number of devices of the mesh.
  size_t num_devices() const;

  // Whether this device has a rank. All devices of a run get the same answer before they enter it,
  // because ranks are assigned to all of them at once.
  bool HasRank(int device);

  // Prepares this run: assigns ranks at the first run, and reserves the workspaces. Each device
  // calls it before it launches, and all of them return the same status. `logical_id` is read at
  // the first run only.
  Status Enter(int64_t run, int device, int64_t logical_id, int64_t workspace_bytes);

  // Null if the device has no rank.
  ControlBlock* control(int device);

 private:
  struct Arrival {
    int device;
    int64_t logical_id;
  };
  struct RankAssignment {
    Group* group;
    int rank;
  };
  // Made by the first device of a run, for all of them.
  struct Decision {
    bool join;  // the rendezvous, to assign ranks or to reserve workspaces
    Status status;
  };

  Decision Decide(int64_t run, int device, int64_t workspace_bytes);
  Status AssignRanks(const std::vector<Arrival>& arrivals);
  std::set<Group*> AssignedGroups() const;  // the caller holds the mutex

  const std::vector<std::vector<int64_t>> groups_;
  const Group::LoadKernels load_kernels_;
  const uint64_t id_;
  Rendezvous<Arrival> rendezvous_;
  std::mutex mutex_;
  std::map<int, RankAssignment> assigned_;              // indexed by CUDA ordinal
  std::deque<std::pair<int64_t, Decision>> decisions_;  // the latest runs'
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_CALL_SITE_H_
