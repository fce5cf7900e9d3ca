// NVSHMEM's world: the processes that it connects, once in the life of each, and their heap. It is
// the processes of the first group whose domains are joined by a network.
#ifndef JAX_EP_RUNTIME_NETWORK_NVSHMEM_WORLD_H_
#define JAX_EP_RUNTIME_NETWORK_NVSHMEM_WORLD_H_

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <utility>

#include "ffi/runtime/network/networks.h"
#include "ffi/runtime/network/nvshmem/heap.h"
#include "ffi/runtime/network/nvshmem/library.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

struct NvshmemOptions {
  std::string folder;  // has libnvshmem_host.so.3; empty: the system's
  // Whether the device can run the kernels, which this build has.
  std::function<Status(int device)> check;
  // Makes the device current, for as long as the function runs.
  std::function<Status(int device, const std::function<Status()>& function)> on_device;
  // Loads the kernels, when NVSHMEM is initialized.
  std::function<Status(const NvshmemLibrary& library)> load_kernels;
};

// Thread-safe.
class NvshmemWorld {
 public:
  explicit NvshmemWorld(NvshmemOptions options) : options_(std::move(options)) {}

  // Starts the world by the processes of a group, or checks that they are in it. Networks::Join.
  Status Join(const NetworkMembers& members, const Status& own);

  // Meaningful once the process has joined.
  int pe() const { return pe_; }
  uint64_t id() const { return id_; }  // the world's
  const NvshmemLibrary& library() const { return *library_; }
  NvshmemHeap* heap() { return &heap_; }

 private:
  Status Prepare(const NetworkMembers& members, const Status& own, NvshmemUniqueId* id);
  Status Start(const NetworkMembers& members, const NvshmemUniqueId& id);

  const NvshmemOptions options_;
  std::mutex mutex_;
  const NvshmemLibrary* library_ = nullptr;
  int pe_ = -1;
  uint64_t id_ = 0;  // 0: it has not started
  Status failure_;   // is kept: a start cannot be tried again
  uint64_t heap_bytes_ = 0;
  NvshmemHeap heap_;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_NVSHMEM_WORLD_H_
