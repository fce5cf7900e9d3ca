#include <atomic>
#include <chrono>

#include "ffi/runtime/call_site.h"

namespace jax_ep {
namespace {

// Devices of one run differ by less than XLA has runs in flight.
constexpr size_t kRunsRemembered = 64;

// XLA itself lets the devices of a run meet just after this, and waits as long.
constexpr std::chrono::seconds kMeetingTimeout{30};

uint64_t NextId() {
  static std::atomic<uint64_t> next{1};
  return next++;
}

}  // namespace

Site::Site(std::vector<std::vector<int64_t>> groups, Group::LoadKernels load_kernels)
    : groups_(std::move(groups)), load_kernels_(load_kernels), id_(NextId()) {}

size_t Site::num_devices() const {
  size_t count = 0;
  for (const auto& group : groups_) count += group.size();
  return count;
}

bool Site::IsSeated(int device) {
  const std::lock_guard lock(mutex_);
  return seats_.contains(device);
}

Status Site::Enter(int64_t run, int device, int64_t logical_id, int64_t workspace_bytes) {
  const Decision decision = Decide(run, device, workspace_bytes);
  if (!decision.meet) return decision.status;
  return meeting_place_.Join(
      run, num_devices(), {device, logical_id},
      [&](const std::vector<Arrival>& arrivals) {
        Status status = SeatAll(arrivals);
        std::set<Group*> groups;
        {
          const std::lock_guard lock(mutex_);
          groups = SeatedGroups();
        }
        for (Group* group : groups) {
          if (status.ok()) {
            status = Groups::OfProcess().Reserve(*group, workspace_bytes, load_kernels_);
          }
        }
        return status;
      },
      kMeetingTimeout);
}

ControlBlock* Site::control(int device) {
  const std::lock_guard lock(mutex_);
  const auto seat = seats_.find(device);
  return seat == seats_.end() ? nullptr : seat->second.group->control(seat->second.rank);
}

Site::Decision Site::Decide(int64_t run, int device, int64_t workspace_bytes) {
  const std::lock_guard lock(mutex_);
  for (const auto& [decided, decision] : decisions_) {
    if (decided == run) return decision;
  }
  Decision decision{!seats_.contains(device), {}};
  for (Group* group : SeatedGroups()) {
    if (decision.status.ok()) decision.status = Groups::OfProcess().Failure(*group);
    if (!Groups::OfProcess().HasRoom(*group, workspace_bytes)) decision.meet = true;
  }
  if (!decision.status.ok()) decision.meet = false;
  decisions_.emplace_front(run, decision);
  if (decisions_.size() > kRunsRemembered) decisions_.pop_back();
  return decision;
}

Status Site::SeatAll(const std::vector<Arrival>& arrivals) {
  std::map<int64_t, int> device_of;  // by logical id
  for (const Arrival& arrival : arrivals) {
    if (IsSeated(arrival.device)) return {};
    device_of[arrival.logical_id] = arrival.device;
  }
  std::map<int, Seat> seats;
  for (const std::vector<int64_t>& ids : groups_) {
    std::vector<int> devices;
    for (int64_t id : ids) {
      const auto found = device_of.find(id);
      if (found == device_of.end()) {
        return FailedPrecondition("jax_ep: no device came for place ", id, " of the mesh, and ",
                                  arrivals.size(), " came in all");
      }
      devices.push_back(found->second);
    }
    Group* const group = Groups::OfProcess().Find(devices);
    for (size_t rank = 0; rank < devices.size(); ++rank) {
      seats[devices[rank]] = {group, static_cast<int>(rank)};
    }
  }
  const std::lock_guard lock(mutex_);
  seats_.merge(seats);
  return {};
}

std::set<Group*> Site::SeatedGroups() const {
  std::set<Group*> groups;
  for (const auto& [device, seat] : seats_) groups.insert(seat.group);
  return groups;
}

}  // namespace jax_ep
