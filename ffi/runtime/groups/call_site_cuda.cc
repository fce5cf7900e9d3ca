#include <algorithm>
#include <chrono>

#include "ffi/runtime/cuda/device_cuda.h"
#include "ffi/runtime/debug.h"
#include "ffi/runtime/groups/call_site.h"
#include "ffi/runtime/groups/groups.h"
#include "ffi/runtime/transport/local/mesh_processes.h"

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

CallSite::CallSite(std::vector<std::vector<int64_t>> groups, int64_t lane, GroupKernels kernels,
                   const Transport* transport, int64_t domain_size)
    : groups_(std::move(groups)),
      lane_(lane),
      domain_size_(domain_size),
      kernels_(kernels),
      transport_(transport),
      id_(NextId()) {}

size_t CallSite::num_devices() const {
  size_t count = 0;
  for (const auto& group : groups_) count += group.size();
  return count;
}

uint64_t CallSite::id(int device) const {
  const RankAssignment* const assigned = Find(device);
  return assigned == nullptr ? id_ : assigned->id;
}

void CallSite::Announce(int64_t run) {
  const std::lock_guard lock(mutex_);
  ++announced_[run];
}

size_t CallSite::NumParticipants(int64_t run) {
  if (const Assignments* const assigned = assigned_.load(std::memory_order_acquire)) {
    return assigned->size();
  }
  if (transport_ == nullptr) return num_devices();  // they are all in this process
  const std::lock_guard lock(mutex_);
  const auto found = announced_.find(run);
  return found == announced_.end() ? num_devices() : found->second;
}

Status CallSite::Enter(int64_t run, const Arrival& arrival) {
  const Decision decision = Decide(run, arrival.workspace_bytes);
  if (!decision.join) return decision.status;
  return rendezvous_.Join(
      run, NumParticipants(run), arrival,
      [this](const std::vector<Arrival>& arrivals) { return Prepare(arrivals); },
      kRendezvousTimeout);
}

ControlBlock* CallSite::control(int device) const {
  const RankAssignment* const assigned = Find(device);
  return assigned == nullptr ? nullptr : assigned->group->control(assigned->rank);
}

void CallSite::Abort(int device, const std::string& reason) const {
  const RankAssignment* const assigned = Find(device);
  if (assigned != nullptr) Groups::OfProcess().Abort(assigned->group, reason);
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
  // Groups of several processes are grown in the same order in all of them.
  std::map<Group*, std::vector<cudaStream_t>, decltype(&IsBefore)> streams(&IsBefore);
  for (const auto& [device, assigned] : *assigned_.load()) {
    std::vector<cudaStream_t>& of_group = streams[assigned.group];
    of_group.resize(assigned.group->num_ranks());
    of_group[static_cast<size_t>(assigned.rank)] = stream_of.at(device);
  }
  Status status;
  for (const auto& [group, of_group] : streams) {
    if (status.ok()) {
      status = group->Reserve(workspace_bytes, of_group);
    } else if (group->peers() != nullptr) {
      group->Abort(status.message);  // its other processes would wait
    }
  }
  return status;
}

Status CallSite::AssignRanks(const std::vector<Arrival>& arrivals) {
  const std::lock_guard lock(mutex_);  // each of several runs may be the first
  if (assigned_.load() != nullptr) return {};
  std::vector<Identity> identities;  // indexed by logical id
  if (Status status = FindIdentities(arrivals, &identities); !status.ok()) return status;
  auto assigned = std::make_unique<Assignments>();
  for (const std::vector<int64_t>& ids : groups_) {
    std::vector<Identity> ranks;
    for (int64_t id : ids) ranks.push_back(identities[static_cast<size_t>(id)]);
    Status status = AssignGroup(ranks, arrivals[0].call, assigned.get());
    if (!status.ok()) return status;
  }
  announced_.clear();
  owned_ = std::move(assigned);
  assigned_.store(owned_.get(), std::memory_order_release);
  return {};
}

// Finds the devices of the mesh, in the order of logical ids.
Status CallSite::FindIdentities(const std::vector<Arrival>& arrivals,
                                std::vector<Identity>* identities) {
  if (arrivals.size() < num_devices()) {
    std::vector<Exchange::Endpoint> local;
    for (const Arrival& arrival : arrivals) {
      local.push_back(
          {arrival.device, arrival.logical_id, arrival.communicator, FindUuid(arrival.device)});
    }
    return FindMeshProcesses(*transport_->exchange, std::move(local), num_devices(),
                             domain_size_ > 0, identities);
  }
  const uint64_t self = ThisProcess().process;
  identities->resize(num_devices());
  for (const Arrival& arrival : arrivals) {
    if (arrival.logical_id < 0 || arrival.logical_id >= static_cast<int64_t>(num_devices())) {
      return FailedPrecondition("jax_ep: a device has the logical id ", arrival.logical_id,
                                " in a mesh of ", num_devices());
    }
    Identity& identity = (*identities)[static_cast<size_t>(arrival.logical_id)];
    identity.process = self;
    identity.device = arrival.device;
  }
  for (size_t id = 0; id < identities->size(); ++id) {
    if ((*identities)[id].process != 0) continue;
    return FailedPrecondition("jax_ep: no device has the logical id ", id, " of the mesh; ",
                              arrivals.size(), " devices joined the call");
  }
  return {};
}

// Assigns ranks to the devices of a group that this process drives, if there are any.
Status CallSite::AssignGroup(const std::vector<Identity>& ranks, const std::string& call,
                             Assignments* assigned) const {
  const uint64_t self = ThisProcess().process;
  std::vector<int> local;
  for (const Identity& rank : ranks) {
    if (rank.process == self) local.push_back(static_cast<int>(rank.device));
  }
  if (local.empty()) return {};
  Group* group = nullptr;
  uint64_t id = id_;
  if (local.size() == ranks.size()) {
    group = Groups::OfProcess().Find(local, lane_, kernels_, domain_size_);
  } else {
    Status status = Groups::OfProcess().FindShared(ranks, lane_, domain_size_, kernels_,
                                                   transport_->memories, &group);
    Stopwatch stopwatch;
    if (status.ok()) status = group->peers()->AgreeOnCall(call, &id);
    if (!status.ok()) return status;
    Debug("call ", id, ", ", call, ": agreed on in ", stopwatch.Lap());
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].process != self) continue;
    (*assigned)[static_cast<int>(ranks[rank].device)] = {group, static_cast<int>(rank), id};
  }
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
