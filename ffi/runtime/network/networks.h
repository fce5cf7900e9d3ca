// The networks of this process's GPUs.
#ifndef JAX_EP_RUNTIME_NETWORK_NETWORKS_H_
#define JAX_EP_RUNTIME_NETWORK_NETWORKS_H_

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/runtime/network/network.h"
#include "ffi/runtime/network/network_thread.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// A GPU's network, with its thread. Thread-safe.
class DeviceNetwork {
 public:
  // The thread calls `begin` first.
  DeviceNetwork(std::unique_ptr<Network> network, std::function<void()> begin)
      : kernels_put_(network->KernelsPut()), thread_(std::move(network), std::move(begin)) {}

  NetworkThread& thread() { return thread_; }

  // Registers memory, and returns what Open needs on a partner.
  Status Register(void* address, size_t bytes, std::string* offer);
  Status Unregister(void* address);

  // Opens a partner's memory. Connects with the partner, if this one has not yet. `network_name`
  // says what carries the bytes.
  Status Open(const std::string& offer, int* memory, std::string* network_name);
  void Close(int memory);

  // See Network, also for what follows.
  bool kernels_put() const { return kernels_put_; }
  Status Allocate(size_t bytes, void** address, bool* out_of_memory);
  void Free(void* address);
  Network::Target TargetOf(int memory, uint64_t address);
  uint64_t Map(int memory, uint64_t address);
  Status Flush(double seconds);

 private:
  const bool kernels_put_;
  std::map<std::string, int> connections_;  // are indexed by address; the thread's
  NetworkThread thread_;
};

// The processes of a group, each of which has to do something before the network joins them.
struct NetworkMembers {
  size_t self = 0;
  size_t count = 0;
  std::vector<int> devices;  // this process's
  // Gathers the bytes of all, in their order. All call it equally often.
  std::function<Status(const std::string& own, std::vector<std::string>* all)> gather;
  std::function<std::string(size_t process)> describe;
};

// Thread-safe.
class Networks {
 public:
  // Makes the network of a device.
  using Factory = std::function<Status(int device, std::unique_ptr<Network>* network)>;

  // Never destroyed: its threads run until the process ends.
  static Networks& OfProcess();

  // From now on NVLink domains are joined by such networks, also domains of one process. Call it
  // before there are groups. Each network's thread calls begin_thread(device) first.
  void Use(Factory factory, std::function<void(int device)> begin_thread = [](int) {});
  bool are_used() const;

  // Some providers have to connect the processes of a group before Find.
  using Join = std::function<Status(const NetworkMembers& members, const Status& own)>;
  void UseJoin(Join join);
  // All processes of the group call it, also after an error of their own, and return the same.
  Status JoinAll(const NetworkMembers& members, const Status& own);

  // Stops all threads, at exit.
  void Stop();

  // Returns the network of a device. If the last one has failed, it is a new one.
  Status Find(int device, std::shared_ptr<DeviceNetwork>* network);

 private:
  mutable std::mutex mutex_;
  Factory factory_;
  std::function<void(int)> begin_thread_;
  Join join_;
  std::map<int, std::shared_ptr<DeviceNetwork>> networks_;  // are indexed by device
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_NETWORKS_H_
