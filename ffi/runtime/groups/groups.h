// The groups of which this process drives ranks.
#ifndef JAX_EP_RUNTIME_GROUPS_GROUPS_H_
#define JAX_EP_RUNTIME_GROUPS_GROUPS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/runtime/groups/group.h"
#include "ffi/runtime/transport/identity.h"
#include "ffi/runtime/transport/transport.h"

namespace jax_ep {

// Thread-safe.
class Groups {
 public:
  // Never destroyed: threads of XLA may outlive static destructors.
  static Groups& OfProcess();

  // The group of a lane of these devices in rank order, in NVLink domains of this size (0: one has
  // all). Calls in domains of another size have another group, because the receive rings between
  // domains are a group's. A group lives until the process ends.
  Group* Find(const std::vector<int>& devices, int64_t lane, const GroupKernels& kernels,
              int64_t domain_size = 0);

  // The group of these ranks likewise, of which other processes drive some. The first call connects
  // with them.
  Status FindShared(const std::vector<Identity>& ranks, int64_t lane, int64_t domain_size,
                    const GroupKernels& kernels, const std::vector<PeerMemory*>& memories,
                    Group** group);

  // Ends the calls of all groups of the group's ranks. A device that makes no call of a lane,
  // because it has failed, makes none of the others either.
  void Abort(const Group* group, const std::string& reason);

  // Waits for the devices, and frees all workspaces. Returns their bytes. All processes of a group
  // call it.
  int64_t Release();

  void PostReports(Mailbox& mailbox);

  // Waits for the devices, at exit, and takes leave of the other processes.
  void Shutdown();

  // Called when another process has died. Ends this one if a GPU does not become idle: it waits in
  // a collective of XLA, which nobody else can end. See JAX_EP_PEER_DEATH_EXIT_S.
  void EndIfBlocked(const std::string& reason);

  // Waits until all devices are idle. If a device has failed, or a call waits for a peer for longer
  // than `warning_seconds` seconds (0: the warning time), the host ends the calls.
  void Drain(double warning_seconds, const char* why);

 private:
  // A rank's process, 0 if it is this one, and its device there.
  using Rank = std::pair<uint64_t, int>;
  struct Key {
    std::vector<Rank> ranks;
    int64_t lane;
    int64_t domain_size;

    friend auto operator<=>(const Key&, const Key&) = default;
  };

  Group* Add(const Key& key, std::unique_ptr<Group> group);
  std::vector<Group*> All() const;
  void Watch();

  std::atomic<bool> has_ended_ = false;
  std::atomic<bool> is_ending_blocked_ = false;
  std::mutex connecting_;
  mutable std::mutex mutex_;
  std::map<Key, std::unique_ptr<Group>> groups_;
};

// An order of groups that is the same in all processes: those of one process come first.
bool IsBefore(const Group* a, const Group* b);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_GROUPS_GROUPS_H_
