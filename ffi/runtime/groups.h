// The groups of this process.
#ifndef JAX_EP_RUNTIME_GROUPS_H_
#define JAX_EP_RUNTIME_GROUPS_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/runtime/group.h"

namespace jax_ep {

// Thread-safe.
class Groups {
 public:
  // Never destroyed: threads of XLA may outlive static destructors.
  static Groups& OfProcess();

  // The group of a lane of these devices in rank order. A group lives until the process ends.
  Group* Find(const std::vector<int>& devices, int64_t lane, const GroupKernels& kernels);

  // Ends the calls of all lanes of these devices. One that makes no call of a lane, because it has
  // failed, makes none of the others either.
  void Abort(const std::vector<int>& devices, const std::string& reason);

  // Waits for the devices, and frees all workspaces. Returns their bytes.
  int64_t Release();

  void PostReports(Mailbox& mailbox);

  // Waits for the devices, at exit.
  void Shutdown();

  // Waits until all devices are idle. If a device has failed, or a call waits for a peer for longer
  // than `warning_seconds` seconds (0: the warning time), the host ends the calls.
  void Drain(double warning_seconds, const char* why);

 private:
  std::vector<Group*> All() const;
  void Watch();

  std::atomic<bool> has_ended_ = false;
  mutable std::mutex mutex_;
  std::map<std::pair<std::vector<int>, int64_t>, std::unique_ptr<Group>> groups_;  // with the lane
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_GROUPS_H_
