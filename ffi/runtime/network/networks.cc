#include "ffi/runtime/network/networks.h"

#include <cstdint>
#include <cstring>
#include <utility>

namespace jax_ep {

// An offer is the length of the address, the address, and the key.
Status DeviceNetwork::Register(void* address, size_t bytes, std::string* offer) {
  return thread_.Run([&](Network& network) {
    std::string own, key;
    Status status = network.Address(&own);
    if (status.ok()) status = network.Register(address, bytes, &key);
    const auto length = static_cast<uint32_t>(own.size());
    offer->assign(reinterpret_cast<const char*>(&length), sizeof length);
    *offer += own + key;
    return status;
  });
}

Status DeviceNetwork::Unregister(void* address) {
  return thread_.Run([&](Network& network) { return network.Unregister(address); });
}

Status DeviceNetwork::Open(const std::string& offer, int* memory, std::string* network_name) {
  uint32_t length = 0;
  if (offer.size() < sizeof length) return InvalidArgument("a partner has sent no address");
  std::memcpy(&length, offer.data(), sizeof length);
  if (offer.size() - sizeof length < length) {
    return InvalidArgument("a partner has sent half an address");
  }
  const std::string address = offer.substr(sizeof length, length);
  const std::string key = offer.substr(sizeof length + length);
  return thread_.Run([&](Network& network) {
    auto found = connections_.find(address);
    if (found == connections_.end()) {
      int connection = 0;
      if (Status status = network.Connect(address, &connection); !status.ok()) return status;
      found = connections_.emplace(address, connection).first;
    }
    *network_name = network.Describe(found->second);
    return network.Open(found->second, key, memory);
  });
}

void DeviceNetwork::Close(int memory) {
  static_cast<void>(thread_.Run([&](Network& network) {
    network.Close(memory);
    return Status{};
  }));
}

Status DeviceNetwork::Allocate(size_t bytes, void** address, bool* out_of_memory) {
  return thread_.Run(
      [&](Network& network) { return network.Allocate(bytes, address, out_of_memory); });
}

void DeviceNetwork::Free(void* address) {
  static_cast<void>(thread_.Run([&](Network& network) {
    network.Free(address);
    return Status{};
  }));
}

Network::Target DeviceNetwork::TargetOf(int memory, uint64_t address) {
  Network::Target target;
  static_cast<void>(thread_.Run([&](Network& network) {
    target = network.TargetOf(memory, address);
    return Status{};
  }));
  return target;
}

uint64_t DeviceNetwork::Map(int memory, uint64_t address) {
  uint64_t mapped = 0;
  static_cast<void>(thread_.Run([&](Network& network) {
    mapped = network.Map(memory, address);
    return Status{};
  }));
  return mapped;
}

Status DeviceNetwork::Flush(double seconds) {
  return thread_.Run([&](Network& network) { return network.Flush(seconds); });
}

Networks& Networks::OfProcess() {
  static auto* const networks = new Networks;
  return *networks;
}

void Networks::Use(Factory factory, std::function<void(int)> begin_thread) {
  const std::lock_guard lock(mutex_);
  factory_ = std::move(factory);
  begin_thread_ = std::move(begin_thread);
}

void Networks::UseJoin(Join join) {
  const std::lock_guard lock(mutex_);
  join_ = std::move(join);
}

Status Networks::JoinAll(const NetworkMembers& members, const Status& own) {
  Join join;
  {
    const std::lock_guard lock(mutex_);
    join = join_;
  }
  return join ? join(members, own) : own;
}

void Networks::Stop() {
  const std::lock_guard lock(mutex_);
  for (const auto& [device, network] : networks_) network->thread().Stop();
}

bool Networks::are_used() const {
  const std::lock_guard lock(mutex_);
  return factory_ != nullptr;
}

Status Networks::Find(int device, std::shared_ptr<DeviceNetwork>* network) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<DeviceNetwork>& found = networks_[device];
  if (!found || !found->thread().Failure().ok()) {
    std::unique_ptr<Network> made;
    if (Status status = factory_(device, &made); !status.ok()) return status;
    found = std::make_shared<DeviceNetwork>(std::move(made),
                                            [begin = begin_thread_, device] { begin(device); });
  }
  *network = found;
  return {};
}

}  // namespace jax_ep
