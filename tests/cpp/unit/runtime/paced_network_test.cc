// A paced network beneath a thread's puts: when they go on, and in which order.
#include "ffi/runtime/network/paced_network.h"

#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "tests/cpp/unit/check.h"
#include "tests/cpp/unit/runtime/noted_network.h"

namespace {

using jax_ep::PacedNetwork;
using jax_ep::Put;
using jax_ep::Status;
using jax_ep::testing::NotedNetwork;
using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void AwaitPuts(PacedNetwork& network, const NotedNetwork& beneath, size_t count) {
  while (beneath.puts.size() < count) CHECK(network.Progress().ok());
}

void TestPutsWaitForTheWireAndTheLatency() {
  auto owned = std::make_unique<NotedNetwork>();
  const NotedNetwork& beneath = *owned;
  PacedNetwork network(std::move(owned), {.gigabytes_per_second = 0.01, .latency_us = 20'000});
  const auto start = Clock::now();
  CHECK(network.IsIdle());
  CHECK(network.Start({.memory = 0, .bytes = 300'000, .flag = 8, .value = 1}).ok());
  CHECK(network.Start({.memory = 0, .bytes = 100'000, .flag = 16, .value = 2}).ok());
  CHECK(network.Progress().ok());
  CHECK(beneath.puts.empty() && !network.IsIdle());
  AwaitPuts(network, beneath, 1);
  CHECK(SecondsSince(start) >= 0.05);  // 30 ms on the wire, then 20
  AwaitPuts(network, beneath, 2);
  CHECK(SecondsSince(start) >= 0.06);  // the second is on the wire meanwhile
  CHECK(beneath.puts[0].value == 1 && beneath.puts[1].value == 2);
  CHECK(beneath.puts[0].bytes == 300'000);
  CHECK(network.IsIdle());
}

void TestFailuresShow() {
  auto owned = std::make_unique<NotedNetwork>();
  NotedNetwork& beneath = *owned;
  PacedNetwork network(std::move(owned), {.gigabytes_per_second = 50, .latency_us = 5});
  beneath.is_idle = false;
  CHECK(!network.IsIdle());
  beneath.failure = jax_ep::FailedPrecondition("a cable was pulled");
  CHECK(network.Progress().message == "a cable was pulled");
  CHECK(network.Describe(0) == "notes, held to 50 GB/s with 5 us of latency by JAX_EP_TEST_PACE");
}

void TestSetting() {
  jax_ep::Pace pace;
  unsetenv("JAX_EP_TEST_PACE");
  CHECK(ReadPace(&pace).ok() && !pace.is_set());
  setenv("JAX_EP_TEST_PACE", "50,5", 1);
  CHECK(ReadPace(&pace).ok() && pace.is_set());
  CHECK(pace.gigabytes_per_second == 50 && pace.latency_us == 5);
  setenv("JAX_EP_TEST_PACE", "12.5", 1);
  CHECK(ReadPace(&pace).ok() && pace.gigabytes_per_second == 12.5 && pace.latency_us == 0);
  for (const char* text : {"0", "fast", "50,", "50,-1", "50,5,1"}) {
    setenv("JAX_EP_TEST_PACE", text, 1);
    CHECK_FAILS(ReadPace(&pace), "JAX_EP_TEST_PACE is \"" + std::string(text) + "\"; expected");
    CHECK(!pace.is_set());
  }
}

}  // namespace

int main() {
  TestPutsWaitForTheWireAndTheLatency();
  TestFailuresShow();
  TestSetting();
  return jax_ep::testing::Finish();
}
