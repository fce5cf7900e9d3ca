// A call site: one custom call of one program. Each device that executes it has a rank in a group.
#ifndef JAX_EP_RUNTIME_GROUPS_CALL_SITE_H_
#define JAX_EP_RUNTIME_GROUPS_CALL_SITE_H_

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ffi/runtime/groups/group.h"
#include "ffi/runtime/groups/rendezvous.h"
#include "ffi/runtime/status.h"
#include "ffi/runtime/transport/identity.h"
#include "ffi/runtime/transport/transport.h"

namespace jax_ep {

class CallSite {
 public:
  // A device that enters a run.
  struct Arrival {
    int device = 0;                 // CUDA ordinal
    cudaStream_t stream = nullptr;  // its calls follow there
    int64_t logical_id = 0;         // read at the first run only
    int64_t workspace_bytes = 0;
    Status status = {};  // an error of this device: the run fails on all of them
    // Of the mesh, lent by XLA. Read at the first run only, if the mesh spans processes.
    void* communicator = nullptr;
    std::string call = {};  // the operation and its shapes, likewise
  };

  // `groups` has the logical device ids of each group, in rank order. Together they are 0 to the
  // mesh's size - 1. Without a `transport` the mesh is one process's. `domain_size` is the number
  // of ranks per NVLink domain; 0: one domain has all ranks.
  CallSite(std::vector<std::vector<int64_t>> groups, int64_t lane, GroupKernels kernels,
           const Transport* transport = nullptr, int64_t domain_size = 0);

  // Distinguishes the calls of a device's group, the same in all of its processes. Before the first
  // run it is unique in the process; a group that spans processes then agrees on another one.
  uint64_t id(int device) const;

  // The number of devices of the mesh.
  size_t num_devices() const;

  // Whether this device has a rank. All devices of a run get the same answer before they enter it,
  // because ranks are assigned to all of them at once. Takes no lock.
  bool HasRank(int device) const { return Find(device) != nullptr; }

  // Counts the devices of this process that take part in a run. Each of them calls it before any of
  // them enters, unless it has a rank. Without such calls the whole mesh takes part.
  void Announce(int64_t run);

  // Prepares this run: assigns ranks at the first run, and reserves the workspaces. Each device
  // calls it before it launches, and all of them return the same status.
  Status Enter(int64_t run, const Arrival& arrival);

  // Null if the device has no rank. Takes no lock.
  ControlBlock* control(int device) const;

  // Ends the calls of all groups of the device's ranks: they would wait for it.
  void Abort(int device, const std::string& reason) const;

 private:
  struct RankAssignment {
    Group* group;
    int rank;
    uint64_t id;  // identifies the call in the group
  };
  using Assignments = std::map<int, RankAssignment>;  // indexed by CUDA ordinal
  // Made by the first device of a run, for all of them.
  struct Decision {
    bool join;  // the rendezvous, to assign ranks or to reserve workspaces
    Status status;
  };

  const RankAssignment* Find(int device) const;
  Decision Decide(int64_t run, int64_t workspace_bytes);
  Status Prepare(const std::vector<Arrival>& arrivals);
  size_t NumParticipants(int64_t run);
  Status AssignRanks(const std::vector<Arrival>& arrivals);
  Status FindIdentities(const std::vector<Arrival>& arrivals, std::vector<Identity>* identities);
  Status AssignGroup(const std::vector<Identity>& ranks, const std::string& call,
                     Assignments* assigned) const;
  std::set<Group*> AssignedGroups() const;

  const std::vector<std::vector<int64_t>> groups_;
  const int64_t lane_;
  const int64_t domain_size_;
  const GroupKernels kernels_;
  const Transport* const transport_;
  const uint64_t id_;
  Rendezvous<Arrival> rendezvous_;
  std::unique_ptr<const Assignments> owned_;
  std::atomic<const Assignments*> assigned_ = nullptr;  // null, then `owned_` for ever
  std::mutex mutex_;
  std::deque<std::pair<int64_t, Decision>> decisions_;  // the latest runs'
  std::map<int64_t, size_t> announced_;                 // devices by run, until ranks are assigned
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_GROUPS_CALL_SITE_H_
