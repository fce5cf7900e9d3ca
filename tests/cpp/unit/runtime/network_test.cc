// The thread that carries out puts, with a network that only takes note of them.
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/device/transfer/hierarchical/layout.h"
#include "ffi/runtime/network/network_thread.h"
#include "tests/cpp/unit/check.h"
#include "tests/cpp/unit/runtime/noted_network.h"

namespace {

using jax_ep::kRailSlotBytes;
using jax_ep::Put;
using jax_ep::RankMemoryAddresses;
using jax_ep::Status;
using jax_ep::testing::NotedNetwork;

// Rank 3 of three domains of two, with 4 slots per rail. Its partners are 5 and 1.
struct Fixture {
  static constexpr int kRank = 3, kSlots = 4;
  jax_ep::RailRequests requests = {};
  std::vector<RankMemoryAddresses> partners = {{0x500000, 0x50000000}, {0x100000, 0x10000000}};
  std::shared_ptr<jax_ep::RailSender> sender = std::make_shared<jax_ep::RailSender>(
      &requests, jax_ep::RailLayout{jax_ep::Domains(6, 2), kRank, kSlots},
      RankMemoryAddresses{0x300000, 0x30000000}, std::vector<int>{50, 10}, partners);

  std::vector<Put> Poll(NotedNetwork& network) {
    network.puts.clear();
    bool found = false;
    CHECK(sender->Poll(network, &found).ok());
    CHECK(found == !network.puts.empty());
    return network.puts;
  }
};

void TestPlacesOfPuts() {
  Fixture fixture;
  NotedNetwork network;
  CHECK(fixture.Poll(network).empty());
  // Rail 0 goes to domain 2, whose rail 1 comes here; rail 1 to domain 0, whose rail 0 does.
  fixture.requests.messages[2] = jax_ep::RequestOfMessage(7, 1000);
  auto puts = fixture.Poll(network);
  CHECK(puts.size() == 1);
  CHECK(puts[0].memory == 50);
  CHECK(puts[0].bytes == 1000 && puts[0].value == 7);
  // The second half of the own rings, after those that are received in.
  const uint64_t send_rings = 0x30000000 + 2 * Fixture::kSlots * kRailSlotBytes;
  CHECK(reinterpret_cast<uint64_t>(puts[0].from) == send_rings + 2 * kRailSlotBytes);
  CHECK(puts[0].to == 0x50000000 + (Fixture::kSlots + 2) * kRailSlotBytes);
  CHECK(puts[0].flag ==
        0x500000 + offsetof(jax_ep::Inbox, rail_messages) + 8 * (Fixture::kSlots + 2));

  fixture.requests.credits[Fixture::kSlots + 1] = 9;
  puts = fixture.Poll(network);
  CHECK(puts.size() == 1);
  CHECK(puts[0].memory == 10 && puts[0].bytes == 0 && puts[0].value == 9);
  CHECK(puts[0].flag == 0x100000 + offsetof(jax_ep::Inbox, rail_credits) + 8 * 1);
  CHECK(fixture.Poll(network).empty());
}

// The largest message fits beside its number.
void TestRequest() {
  const uint64_t number = uint64_t{1} << 44;
  const uint64_t request = jax_ep::RequestOfMessage(number, kRailSlotBytes);
  CHECK(jax_ep::MessageNumber(request) == number);
  CHECK(jax_ep::MessageBytes(request) == kRailSlotBytes);
}

// All partners are told once.
void TestAbortAndLeave() {
  Fixture fixture;
  NotedNetwork network;
  fixture.requests.abort = 5;
  auto puts = fixture.Poll(network);
  CHECK(puts.size() == 2);
  CHECK(puts[0].flag == 0x500000 + offsetof(jax_ep::Inbox, abort) && puts[0].value == 5);
  CHECK(puts[1].flag == 0x100000 + offsetof(jax_ep::Inbox, abort) && puts[1].memory == 10);
  fixture.requests.leave = 77;
  puts = fixture.Poll(network);
  CHECK(puts.size() == 2);
  // The word is that of this rank's domain.
  CHECK(puts[0].flag == 0x500000 + offsetof(jax_ep::Inbox, rail_leaves) + 8 * 1);
  CHECK(puts[1].value == 77);
  CHECK(fixture.Poll(network).empty());
}

void RunOn(jax_ep::NetworkThread& thread, const std::function<void()>& work) {
  CHECK(thread
            .Run([&](jax_ep::Network&) {
              work();
              return Status{};
            })
            .ok());
}

void TestThreadServesUntilRemoved() {
  Fixture fixture;
  auto owned = std::make_unique<NotedNetwork>();
  NotedNetwork& network = *owned;
  jax_ep::NetworkThread thread(std::move(owned));
  thread.Add(fixture.sender);
  std::atomic_ref(fixture.requests.messages[0]).store(jax_ep::RequestOfMessage(1, 128));
  CHECK(thread.Remove(fixture.sender, 10).ok());
  size_t count = 0;
  RunOn(thread, [&] { count = network.puts.size(); });
  CHECK(count == 1);
  std::atomic_ref(fixture.requests.messages[0]).store(jax_ep::RequestOfMessage(5, 128));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  RunOn(thread, [&] { count = network.puts.size(); });
  CHECK(count == 1);
}

void TestThreadReportsFailures() {
  Fixture fixture;
  auto owned = std::make_unique<NotedNetwork>();
  NotedNetwork& network = *owned;
  jax_ep::NetworkThread thread(std::move(owned));
  thread.Add(fixture.sender);
  // Remove says what has not arrived.
  RunOn(thread, [&] { network.is_idle = false; });
  const Status late = thread.Remove(fixture.sender, 0.01);
  CHECK(late.message.find("have not arrived within 0.01 s") != std::string::npos);
  thread.Add(fixture.sender);
  RunOn(thread, [&] { network.failure = jax_ep::FailedPrecondition("a cable was pulled"); });
  while (thread.Failure().ok()) std::this_thread::yield();
  CHECK(thread.Failure().message == "a cable was pulled");
  CHECK(thread.Remove(fixture.sender, 10).message == "a cable was pulled");
}

}  // namespace

int main() {
  TestPlacesOfPuts();
  TestRequest();
  TestAbortAndLeave();
  TestThreadServesUntilRemoved();
  TestThreadReportsFailures();
  return jax_ep::testing::Finish();
}
