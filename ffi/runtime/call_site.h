// A call site: the devices that execute one custom call of one program, each with its place in a
// group.
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
  // Logical ids of the ranks, group after group; together they are 0 to the mesh's size - 1.
  CallSite(std::vector<std::vector<int64_t>> groups, Group::LoadKernels load_kernels);

  // Differs from that of every other call site of the process.
  uint64_t id() const { return id_; }

  // Devices of the mesh.
  size_t num_devices() const;

  // Whether this device knows its group. All devices of a run get the same answer before they
  // enter it, because they are seated together.
  bool HasRank(int device);

  // Before any device of this run launches. All devices of the run return the same status.
  // `logical_id` is not read once seated.
  Status Enter(int64_t run, int device, int64_t logical_id, int64_t workspace_bytes);

  // Null if the device is not seated.
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
  // What the first device of a run found, for all of them.
  struct Decision {
    bool meet;
    Status status;
  };

  Decision Decide(int64_t run, int device, int64_t workspace_bytes);
  Status AssignRanks(const std::vector<Arrival>& arrivals);
  std::set<Group*> AssignedGroups() const;  // with the mutex held

  const std::vector<std::vector<int64_t>> groups_;
  const Group::LoadKernels load_kernels_;
  const uint64_t id_;
  Rendezvous<Arrival> rendezvous_;
  std::mutex mutex_;
  std::map<int, RankAssignment> assigned_;              // by CUDA ordinal
  std::deque<std::pair<int64_t, Decision>> decisions_;  // of the latest runs
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_CALL_SITE_H_
