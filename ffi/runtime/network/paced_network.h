// A network that imitates a slower one: each put waits for its turn on a wire of a given rate, then
// for a latency, before the network beneath carries it out. For measurements on one machine.
#ifndef JAX_EP_RUNTIME_NETWORK_PACED_NETWORK_H_
#define JAX_EP_RUNTIME_NETWORK_PACED_NETWORK_H_

#include <chrono>
#include <deque>
#include <memory>
#include <string>

#include "ffi/runtime/network/network.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

struct Pace {
  double gigabytes_per_second = 0;  // 0: as the network beneath
  double latency_us = 0;

  bool is_set() const { return gigabytes_per_second > 0; }
};

// JAX_EP_TEST_PACE, such as "50,5". An error says what it may be.
Status ReadPace(Pace* pace);

class PacedNetwork final : public Network {
 public:
  // `network` is one whose puts a thread of the host carries out.
  PacedNetwork(std::unique_ptr<Network> network, const Pace& pace);

  Status Start(const Put& put) override;
  Status Progress() override;
  bool IsIdle() const override { return waiting_.empty() && network_->IsIdle(); }
  std::string Describe(int connection) const override;

  Status Register(void* address, size_t bytes, std::string* key) override {
    return network_->Register(address, bytes, key);
  }
  Status Unregister(void* address) override { return network_->Unregister(address); }
  Status Address(std::string* address) override { return network_->Address(address); }
  Status Connect(const std::string& address, int* connection) override {
    return network_->Connect(address, connection);
  }
  Status Open(int connection, const std::string& key, int* memory) override {
    return network_->Open(connection, key, memory);
  }
  void Close(int memory) override { network_->Close(memory); }

 private:
  using Clock = std::chrono::steady_clock;

  struct Waiting {
    Put put;
    Clock::time_point until;
  };

  const std::unique_ptr<Network> network_;
  const Pace pace_;
  Clock::time_point wire_is_free_ = {};
  std::deque<Waiting> waiting_;
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_PACED_NETWORK_H_
