// The networks of this process's GPUs.
#ifndef JAX_EP_RUNTIME_NETWORK_NETWORKS_H_
#define JAX_EP_RUNTIME_NETWORK_NETWORKS_H_

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "ffi/runtime/network/network.h"
#include "ffi/runtime/network/network_thread.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// A GPU's network, with its thread. Thread-safe.
class DeviceNetwork {
 public:
  // The thread calls `begin` first.
  DeviceNetwork(std::unique_ptr<Network> network, std::function<void()> begin)
      : thread_(std::move(network), std::move(begin)) {}

  NetworkThread& thread() { return thread_; }

  // Registers memory, and returns what Open needs on a partner.
  Status Register(void* address, size_t bytes, std::string* offer);
  Status Unregister(void* address);

  // Opens a partner's memory. Connects with the partner, if this one has not yet. `network_name`
  // says what carries the bytes.
  Status Open(const std::string& offer, int* memory, std::string* network_name);
  void Close(int memory);

 private:
  std::map<std::string, int> connections_;  // are indexed by address; the thread's
  NetworkThread thread_;
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

  // Stops all threads, at exit.
  void Stop();

  // Returns the network of a device. If the last one has failed, it is a new one.
  Status Find(int device, std::shared_ptr<DeviceNetwork>* network);

 private:
  mutable std::mutex mutex_;
  Factory factory_;
  std::function<void(int)> begin_thread_;
  std::map<int, std::shared_ptr<DeviceNetwork>> networks_;  // are indexed by device
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_NETWORKS_H_
