#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>
#include <utility>

#include "ffi/runtime/cuda/device_cuda.h"
#include "ffi/runtime/debug.h"
#include "ffi/runtime/groups/groups.h"
#include "ffi/runtime/network/networks.h"
#include "ffi/runtime/settings.h"
#include "ffi/runtime/transport/local/connections.h"

namespace jax_ep {
namespace {

// At exit nobody comes any more whom a call could wait for.
constexpr double kWarningSecondsAtExit = 5;

constexpr std::chrono::milliseconds kWatchPeriod{250};

constexpr int kExitStatusOfBlocked = 70;  // EX_SOFTWARE

// The finalizer of SplitMix64.
uint64_t MixBits(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

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

Group* Groups::Find(const std::vector<int>& devices, int64_t lane, const GroupKernels& kernels,
                    int64_t domain_size) {
  Key key = {{}, lane, domain_size};  // LANE_GROUP
  for (int device : devices) key.ranks.push_back({0, device});
  {
    const std::lock_guard lock(mutex_);
    const auto found = groups_.find(key);
    if (found != groups_.end()) return found->second.get();
  }
  return Add(key, std::make_unique<Group>(devices, kernels, domain_size));
}

Status Groups::FindShared(const std::vector<Identity>& ranks, int64_t lane, int64_t domain_size,
                          const GroupKernels& kernels, const std::vector<PeerMemory*>& memories,
                          Group** group) {
  const uint64_t self = ThisProcess().process;
  Key key = {{}, lane, domain_size};
  std::vector<int> devices;
  uint64_t number = static_cast<uint64_t>(domain_size << 32 | lane) + 1;
  for (const Identity& rank : ranks) {
    const int device = static_cast<int>(rank.device);
    key.ranks.push_back({rank.process == self ? 0 : rank.process, device});
    devices.push_back(rank.process == self ? device : kRemoteDevice);
    number = MixBits(number ^ MixBits(rank.process + static_cast<uint64_t>(device)));
  }
  const std::lock_guard one_at_a_time(connecting_);
  {
    const std::lock_guard lock(mutex_);
    const auto found = groups_.find(key);
    if (found != groups_.end()) {
      *group = found->second.get();
      return {};
    }
  }
  auto peers = std::make_unique<PeerGroup>(number, ranks);
  Stopwatch stopwatch;
  if (Status status = peers->Connect(domain_size); !status.ok()) return status;
  Debug("a group of ", ranks.size(), " ranks, lane ", lane,
        domain_size > 0 ? Concatenate(", NVLink domains of ", domain_size) : "", ": ",
        peers->processes().size(), " processes connected in ", stopwatch.Lap());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto shares = [&](const Identity& other) {
      return std::strcmp(other.gpu, ranks[rank].gpu) == 0;
    };
    const auto first = std::find_if(ranks.begin(), ranks.end(), shares) - ranks.begin();
    Debug("  rank ", rank, " in ", Describe(ranks[rank]), ": ", ranks[rank].gpu,
          first < static_cast<long>(rank) ? Concatenate(", which rank ", first, " has, too") : "");
  }
  *group =
      Add(key, std::make_unique<Group>(devices, kernels, domain_size, std::move(peers), memories));
  return {};
}

// Keeps the first of several groups.
Group* Groups::Add(const Key& key, std::unique_ptr<Group> group) {
  const std::lock_guard lock(mutex_);
  if (groups_.empty()) std::thread([this] { Watch(); }).detach();
  return groups_.try_emplace(key, std::move(group)).first->second.get();
}

void Groups::Abort(const Group* group, const std::string& reason) {
  std::vector<Group*> others;
  {
    const std::lock_guard lock(mutex_);
    const auto is_it = [&](const auto& entry) { return entry.second.get() == group; };
    const auto found = std::find_if(groups_.begin(), groups_.end(), is_it);
    for (const auto& [key, other] : groups_) {
      if (found != groups_.end() && key.ranks == found->first.ranks) others.push_back(other.get());
    }
  }
  for (Group* other : others) other->Abort(reason);
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
  // Calls of other processes may wait for messages of calls that have ended here.
  for (Group* group : All()) group->Flush();
  Networks::OfProcess().Stop();  // soon nobody may call the driver any more
  Connections::OfProcess().Leave();
}

void Groups::EndIfBlocked(const std::string& reason) {
  const double seconds = PeerDeathExitSeconds();
  if (seconds < 0 || is_ending_blocked_.exchange(true)) return;
  std::thread([this, seconds, reason] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    std::set<int> devices;
    for (Group* group : All()) devices.insert(group->devices().begin(), group->devices().end());
    DeviceWaits waits(devices);
    if (has_ended_ || waits.Await(std::chrono::seconds(1))) return;
    std::fprintf(stderr,
                 "%s. A GPU of this process is busy %g s later: it waits in a collective that "
                 "nobody can end, so the process ends (JAX_EP_PEER_DEATH_EXIT_S)\n",
                 reason.c_str(), seconds);
    std::_Exit(kExitStatusOfBlocked);
  }).detach();
}

void Groups::Drain(double warning_seconds, const char* why) {
  const std::vector<Group*> groups = All();
  std::set<int> devices;
  for (Group* group : groups) {
    devices.insert(group->devices().begin(), group->devices().end());
  }
  // Twice: a device that was idle may since have got the call that another one waited for.
  for (int round = 0; round < 2; ++round) {
    DeviceWaits waits(devices);
    while (!waits.Await(std::chrono::milliseconds(100))) {
      for (Group* group : groups) {
        // Again and again: generations may have started since.
        if (warning_seconds > 0) group->ShortenWarnings(warning_seconds);
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

// Groups with several processes come in the same order in all of them, so that releases do not wait
// for each other.
std::vector<Group*> Groups::All() const {
  const std::lock_guard lock(mutex_);
  std::vector<Group*> groups;
  for (const auto& [key, group] : groups_) groups.push_back(group.get());
  std::stable_sort(groups.begin(), groups.end(), IsBefore);
  return groups;
}

bool IsBefore(const Group* a, const Group* b) {
  const auto key = [](const Group* group) { return group->peers() ? group->peers()->key() : 0; };
  return std::pair(key(a), a) < std::pair(key(b), b);
}

void Groups::Watch() {
  while (true) {
    std::this_thread::sleep_for(kWatchPeriod);
    if (has_ended_) return;  // soon nobody may call the driver any more
    for (Group* group : All()) group->Watch();
  }
}

}  // namespace jax_ep
