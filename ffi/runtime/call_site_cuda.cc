#include <atomic>
#include <chrono>

#include "ffi/runtime/call_site.h"

namespace jax_ep {
namespace {

// Devices of one run differ by less than XLA has runs in flight.
constexpr size_t kRunsRemembered = 64;

// XLA has a rendezvous of its own right after this one, with the same timeout.
constexpr std::chrono::seconds kRendezvousTimeout{30};

uint64_t NextId() {
  static std::atomic<uint64_t> next{1};
  return next++;
}

}  // namespace

CallSite::CallSite(std::vector<std::vector<int64_t>> groups, Group::LoadKernels load_kernels)
    : groups_(std::move(groups)), load_kernels_(load_kernels), id_(NextId()) {}

size_t CallSite::num_devices() const {
  size_t count = 0;
  for (const auto& group : groups_) count += group.size();
  return count;
}

bool CallSite::HasRank(int device) {
  const std::lock_guard lock(mutex_);
  return assigned_.contains(device);
}

Status CallSite::Enter(int64_t run, int device, int64_t logical_id, int64_t workspace_bytes) {
  const Decision decision = Decide(run, device, workspace_bytes);
  if (!decision.join) return decision.status;
  return rendezvous_.Join(
      run, num_devices(), {device, logical_id},
      [&](const std::vector<Arrival>& arrivals) {
        Status status = AssignRanks(arrivals);
        std::set<Group*> groups;
        {
          const std::lock_guard lock(mutex_);
          groups = AssignedGroups();
        }
        for (Group* group : groups) {
          if (status.ok()) {
            status = Groups::OfProcess().Reserve(*group, workspace_bytes, load_kernels_);
          }
        }
        return status;
      },
      kRendezvousTimeout);
}

ControlBlock* CallSite::control(int device) {
  const std::lock_guard lock(mutex_);
  const auto assigned_rank = assigned_.find(device);
  return assigned_rank == assigned_.end()
             ? nullptr
             : assigned_rank->second.group->control(assigned_rank->second.rank);
}

CallSite::Decision CallSite::Decide(int64_t run, int device, int64_t workspace_bytes) {
  const std::lock_guard lock(mutex_);
  for (const auto& [decided, decision] : decisions_) {
    if (decided == run) return decision;
  }
  Decision decision{!assigned_.contains(device), {}};
  for (Group* group : AssignedGroups()) {
    if (decision.status.ok()) decision.status = Groups::OfProcess().Failure(*group);
    if (!Groups::OfProcess().HasRoom(*group, workspace_bytes)) decision.join = true;
  }
  if (!decision.status.ok()) decision.join = false;
  decisions_.emplace_front(run, decision);
  if (decisions_.size() > kRunsRemembered) decisions_.pop_back();
  return decision;
}

Status CallSite::AssignRanks(const std::vector<Arrival>& arrivals) {
  std::map<int64_t, int> device_of;  // indexed by logical id
  for (const Arrival& arrival : arrivals) {
    if (HasRank(arrival.device)) return {};
    device_of[arrival.logical_id] = arrival.device;
  }
  std::map<int, RankAssignment> assigned;
  for (const std::vector<int64_t>& ids : groups_) {
    std::vector<int> devices;
    for (int64_t id : ids) {
      const auto found = device_of.find(id);
      if (found == device_of.end()) {
        return FailedPrecondition("jax_ep: no device has the logical id ", id, " of the mesh; ",
                                  arrivals.size(), " devices joined the call");
      }
      devices.push_back(found->second);
    }
    Group* const group = Groups::OfProcess().Find(devices);
    for (size_t rank = 0; rank < devices.size(); ++rank) {
      assigned[devices[rank]] = {group, static_cast<int>(rank)};
    }
  }
  const std::lock_guard lock(mutex_);
  assigned_.merge(assigned);
  return {};
}

std::set<Group*> CallSite::AssignedGroups() const {
  std::set<Group*> groups;
  for (const auto& [device, assigned_rank] : assigned_) groups.insert(assigned_rank.group);
  return groups;
}

}  // namespace jax_ep
