// Tests that a network that does not keep its promises is found before kernels use it.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "ffi/runtime/network/networks.h"
#include "tests/cpp/emulation/runtime/fixture.h"

namespace jax_ep::testing {
namespace {

using Clock = std::chrono::steady_clock;

enum class Fault { kNone, kWrongByte, kFlagBeforeBytes, kNoMessage, kNoCredit };
std::atomic<Fault> fault = Fault::kNone;
std::atomic<int> num_messages = 0;

// Serves one process: puts land at once, but for a fault of each put of some sizes.
class BrokenNetwork : public Network {
 public:
  Status Register(void* /*address*/, size_t /*bytes*/, std::string* /*key*/) override { return {}; }
  Status Unregister(void* /*address*/) override { return {}; }
  Status Address(std::string* /*address*/) override { return {}; }
  Status Connect(const std::string& /*address*/, int* /*connection*/) override { return {}; }
  Status Open(int /*connection*/, const std::string& /*key*/, int* /*memory*/) override {
    return {};
  }
  void Close(int /*memory*/) override {}

  Status Start(const Put& put) override {
    num_messages += put.bytes > 0;
    auto* const to = reinterpret_cast<uint8_t*>(put.to);
    if (put.bytes > 1000 && fault == Fault::kFlagBeforeBytes) {
      late_.push_back({put, Clock::now() + std::chrono::milliseconds(20)});
    } else if (put.bytes > 0) {
      std::memcpy(to, put.from, put.bytes);
      if (put.bytes > 1000 && fault == Fault::kWrongByte) to[1000] ^= 0x10;
    }
    const Fault lost = put.bytes > 0 ? Fault::kNoMessage : Fault::kNoCredit;
    if (fault == lost && put.value == 7) return {};
    std::atomic_ref(*reinterpret_cast<uint64_t*>(put.flag))
        .store(put.value, std::memory_order_release);
    return {};
  }
  Status Progress() override {
    std::erase_if(late_, [](const Late& late) {
      if (Clock::now() < late.when) return false;
      std::memcpy(reinterpret_cast<void*>(late.put.to), late.put.from, late.put.bytes);
      return true;
    });
    return {};
  }
  bool IsIdle() const override { return late_.empty(); }
  std::string Describe(int /*connection*/) const override { return "a broken network"; }

 private:
  struct Late {
    Put put;
    Clock::time_point when;
  };
  std::vector<Late> late_;
};

DispatchProgram Program(int num_ranks, int domain_size) {
  return {num_ranks, kSmall, true, 0, {0, 2, 2}, {}, domain_size};
}

void TestFaultsAreFound() {
  const struct {
    Fault fault;
    std::vector<const char*> parts;
  } cases[] = {
      {Fault::kWrongByte, {"byte 1000 when its flag is there", "from rank "}},
      {Fault::kFlagBeforeBytes, {" when its flag is there; expected "}},
      {Fault::kNoMessage, {"a message of ", " has not arrived within 1 s"}},
      {Fault::kNoCredit, {" has not arrived within 1 s"}},
  };
  for (const auto& [injected, parts] : cases) {
    Restart();
    fault = injected;
    DispatchProgram program = Program(4, 2);
    const auto start = Clock::now();
    for (const Status& status : program.Run()) {
      CHECK_FAILS(status, "the network between hosts, a broken network, does not pass its probe: ");
      for (const char* part : parts) CHECK_FAILS(status, part);
    }
    CHECK(Clock::now() - start < std::chrono::seconds(8));
    // The network is right now: the next call tries again.
    fault = Fault::kNone;
    Restart();
    Program(4, 2).Check();
  }
}

void TestNetworksThatWork() {
  for (const auto& [ranks, domain_size] : {std::pair{2, 1}, {6, 2}, {6, 3}, {5, 1}}) {
    Restart();
    for (int i = 0; i < 2; ++i) Program(ranks, domain_size).Check();
  }
}

// A generation that a release begins has no rings.
void TestRelease() {
  Restart();
  Program(4, 2).Check();
  const int before = num_messages;
  CHECK(before > 0);
  Groups::OfProcess().Release();
  CHECK(num_messages == before);
  Program(4, 2).Check();
  CHECK(num_messages > before);
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) {
  using namespace jax_ep;
  using namespace jax_ep::testing;
  RegisterKernels();
  setenv("JAX_EP_ENTRY_TIMEOUT_S", "1", 1);
  DispatchProgram::rail_slots = 0;  // a group knows the rings of its rails
  Networks::OfProcess().Use([](int /*device*/, std::unique_ptr<Network>* network) {
    *network = std::make_unique<BrokenNetwork>();
    return Status{};
  });
  return RunCases({{"faults are found", TestFaultsAreFound},
                   {"networks that work", TestNetworksThatWork},
                   {"a release", TestRelease}},
                  argc, argv);
}
