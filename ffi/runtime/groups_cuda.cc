#include <chrono>
#include <condition_variable>
#include <set>
#include <thread>
#include <utility>

#include "ffi/runtime/device_cuda.h"
#include "ffi/runtime/groups.h"

namespace jax_ep {
namespace {

// At exit nobody comes any more whom a call could wait for.
constexpr double kWarningSecondsAtExit = 5;

// Waits for all devices at once, each in a thread of its own: one that waits for another can end
// only after the other has.
class DeviceWaits {
 public:
  explicit DeviceWaits(const std::set<int>& devices) : left_(devices.size()) {
    for (int device : devices) {
      threads_.emplace_back([this, device] { Wait(device); });
    }
  }
  ~DeviceWaits() {
    for (std::thread& thread : threads_) thread.join();
  }

  // Waits for a while. Returns whether all devices are idle or have failed.
  bool Await(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, time, [this] { return left_ == 0; });
  }

  // The first of these devices that has failed.
  Status Failure(const std::vector<int>& devices) {
    const std::lock_guard lock(mutex_);
    for (int device : devices) {
      if (failures_.contains(device)) return failures_[device];
    }
    return {};
  }

 private:
  void Wait(int device) {
    const CurrentDevice current(device);
    Status status = OnGpu(device, FromCuda(cudaDeviceSynchronize(), "waiting for the device"));
    const std::lock_guard lock(mutex_);
    if (!status.ok()) failures_[device] = std::move(status);
    --left_;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  size_t left_;
  std::map<int, Status> failures_;
  std::vector<std::thread> threads_;
};

}  // namespace

Groups& Groups::OfProcess() {
  static Groups* const groups = new Groups;
  return *groups;
}

Group* Groups::Find(const std::vector<int>& devices, int64_t lane, const GroupKernels& kernels) {
  const std::lock_guard lock(mutex_);
  if (groups_.empty()) std::thread([this] { Watch(); }).detach();
  std::unique_ptr<Group>& group = groups_[{devices, lane}];  // LANE_GROUP
  if (!group) group = std::make_unique<Group>(devices, kernels);
  return group.get();
}

void Groups::Abort(const std::vector<int>& devices, const std::string& reason) {
  for (Group* group : All()) {
    if (group->devices() == devices) group->Abort(reason);
  }
}

int64_t Groups::Release() {
  Drain(0, "jax_ep.release() waits for the devices");
  int64_t freed = 0;
  for (Group* group : All()) freed += group->Release();
  return freed;
}

void Groups::PostReports(Mailbox& mailbox) {
  for (Group* group : All()) group->PostReports(mailbox);
}

void Groups::Shutdown() {
  has_ended_ = true;
  Drain(kWarningSecondsAtExit, "the process exits");
}

void Groups::Drain(double warning_seconds, const char* why) {
  const std::vector<Group*> groups = All();
  std::set<int> devices;
  for (Group* group : groups) {
    if (warning_seconds > 0) group->ShortenWarnings(warning_seconds);
    devices.insert(group->devices().begin(), group->devices().end());
  }
  // Twice: a device that was idle may since have got the call that another one waited for.
  for (int round = 0; round < 2; ++round) {
    DeviceWaits waits(devices);
    while (!waits.Await(std::chrono::milliseconds(100))) {
      for (Group* group : groups) {
        const Status failure = waits.Failure(group->devices());
        if (failure.ok()) {
          group->AbortLongWait(why);
        } else {
          group->Abort(failure.message);
        }
      }
    }
  }
}

std::vector<Group*> Groups::All() const {
  const std::lock_guard lock(mutex_);
  std::vector<Group*> groups;
  for (const auto& [key, group] : groups_) groups.push_back(group.get());
  return groups;
}

void Groups::Watch() {
  while (true) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    if (has_ended_) return;  // soon nobody may call the driver any more
    for (Group* group : All()) group->PrintWarnings();
  }
}

}  // namespace jax_ep
