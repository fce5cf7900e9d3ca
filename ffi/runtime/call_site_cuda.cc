#include <algorithm>
#include <chrono>

#include "ffi/runtime/call_site.h"
#include "ffi/runtime/groups.h"

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

CallSite::CallSite(std::vector<std::vector<int64_t>> groups, int64_t lane, GroupKernels kernels)
    : groups_(std::move(groups)), lane_(lane), kernels_(kernels), id_(NextId()) {}

size_t CallSite::num_devices() const {
  size_t count = 0;
  for (const auto& group : groups_) count += group.size();
  return count;
}

Status CallSite::Enter(int64_t run, const Arrival& arrival) {
  const Decision decision = Decide(run, arrival.workspace_bytes);
  if (!decision.join) return decision.status;
  return rendezvous_.Join(
      run, num_devices(), arrival,
      [this](const std::vector<Arrival>& arrivals) { return Prepare(arrivals); },
      kRendezvousTimeout);
}

ControlBlock* CallSite::control(int device) const {
  const RankAssignment* const assigned = Find(device);
  return assigned == nullptr ? nullptr : assigned->group->control(assigned->rank);
}

void CallSite::Abort(int device, const std::string& reason) const {
  const RankAssignment* const assigned = Find(device);
  if (assigned != nullptr) Groups::OfProcess().Abort(assigned->group->devices(), reason);
}

const CallSite::RankAssignment* CallSite::Find(int device) const {
  const Assignments* const assigned = assigned_.load(std::memory_order_acquire);
  if (assigned == nullptr) return nullptr;
  const auto found = assigned->find(device);
  return found == assigned->end() ? nullptr : &found->second;
}

CallSite::Decision CallSite::Decide(int64_t run, int64_t workspace_bytes) {
  const std::lock_guard lock(mutex_);
  for (const auto& [decided, decision] : decisions_) {
    if (decided == run) return decision;
  }
  Decision decision{assigned_.load(std::memory_order_acquire) == nullptr, {}};
  for (const Group* group : AssignedGroups()) {
    if (decision.status.ok()) decision.status = group->Failure();
    // Freeing waits for the devices, so it is done where no kernel can wait for a launch.
    if (!group->HasRoom(workspace_bytes) || group->HasUnused()) decision.join = true;
  }
  if (!decision.status.ok()) decision.join = false;
  decisions_.emplace_front(run, decision);
  if (decisions_.size() > kRunsRemembered) decisions_.pop_back();
  return decision;
}

// Called by the last device that arrives, for all of them.
Status CallSite::Prepare(const std::vector<Arrival>& arrivals) {
  std::map<int, cudaStream_t> stream_of;  // indexed by CUDA ordinal
  int64_t workspace_bytes = 0;
  for (const Arrival& arrival : arrivals) {
    if (!arrival.status.ok()) return arrival.status;
    stream_of[arrival.device] = arrival.stream;
    workspace_bytes = std::max(workspace_bytes, arrival.workspace_bytes);
  }
  if (Status status = AssignRanks(arrivals); !status.ok()) return status;
  std::map<Group*, std::vector<cudaStream_t>> streams;  // in rank order
  for (const auto& [device, assigned] : *assigned_.load()) {
    std::vector<cudaStream_t>& of_group = streams[assigned.group];
    of_group.resize(std::max(of_group.size(), size_t(assigned.rank) + 1));
    of_group[assigned.rank] = stream_of.at(device);
  }
  for (const auto& [group, of_group] : streams) {
    if (Status status = group->Reserve(workspace_bytes, of_group); !status.ok()) return status;
  }
  return {};
}

Status CallSite::AssignRanks(const std::vector<Arrival>& arrivals) {
  const std::lock_guard lock(mutex_);  // each of several runs may be the first
  if (assigned_.load() != nullptr) return {};
  std::map<int64_t, int> device_of;  // indexed by logical id
  for (const Arrival& arrival : arrivals) device_of[arrival.logical_id] = arrival.device;
  auto assigned = std::make_unique<Assignments>();
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
    Group* const group = Groups::OfProcess().Find(devices, lane_, kernels_);
    for (size_t rank = 0; rank < devices.size(); ++rank) {
      (*assigned)[devices[rank]] = {group, static_cast<int>(rank)};
    }
  }
  owned_ = std::move(assigned);
  assigned_.store(owned_.get(), std::memory_order_release);
  return {};
}

std::set<Group*> CallSite::AssignedGroups() const {
  std::set<Group*> groups;
  const Assignments* const all = assigned_.load(std::memory_order_acquire);
  if (all == nullptr) return groups;
  for (const auto& [device, assigned] : *all) groups.insert(assigned.group);
  return groups;
}

}  // namespace jax_ep
