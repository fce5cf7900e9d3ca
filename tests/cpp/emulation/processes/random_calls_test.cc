// Tests random calls of several processes in several layouts, each result compared bit for bit, and
// processes killed at random moments.
//
//   random_calls_test [--calls N] [--kills N] [--seed N] [--ucx FOLDER] [--only CASE]
//   random_calls_nvshmem_test, the same with --nvshmem FOLDER
//
//   --seed 0           takes another one each time
//   --ucx FOLDER       joins NVLink domains by UCX, over TCP; the folder has libucp
//   --nvshmem FOLDER   joins them by NVSHMEM, with kernels that put by themselves; the folder has
//                      the fake of its library
#include "tests/cpp/emulation/processes/random_calls.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#ifdef JAX_EP_NVSHMEM
#include "tests/cpp/emulation/processes/fake_nvshmem.h"
#else
#include "tests/cpp/emulation/processes/ucx_networks.h"
#endif

namespace jax_ep::testing {
namespace {

#ifdef JAX_EP_NVSHMEM  // a process for each GPU
constexpr Layout kLayouts[] = {{2, 1}, {4, 1}};
constexpr Layout kHosts[] = {{2, 1, true}, {4, 1, true}};
constexpr std::string_view kNetworkOption = "--nvshmem";
#else
constexpr Layout kLayouts[] = {{2, 1}, {4, 1}, {2, 2}, {3, 2}};
constexpr Layout kHosts[] = {{2, 1, true}, {4, 1, true}, {2, 2, true}, {3, 2, true}};
constexpr std::string_view kNetworkOption = "--ucx";
#endif
std::string network_folder;  // empty: domains are joined by loads and stores

void UseNetwork() {
  if (network_folder.empty()) return;
#ifdef JAX_EP_NVSHMEM
  UseFakeNvshmem(network_folder);
#else
  UseUcx(network_folder);
#endif
}

void TestRandomCalls(Layout layout, uint64_t num_calls, uint64_t seed, bool by_ipc = false) {
  SharedExchange exchange;
  Forks forks(layout.num_processes, [&](int index) {
    Process process(layout, index, &exchange, seed);
    UseNetwork();
    if (by_ipc) process.transport.memories = {CudaIpcMemory()};
    RandomCalls calls(&process, layout, seed);
    while (calls.num_calls < num_calls && failures == 0) {
      CHECK_OK(calls.Next());
      if (calls.IsTimeToRelease()) Groups::OfProcess().Release();
    }
    // Generations without workspaces are left, one for each lane and size of domains. They do not
    // become more.
    for (int64_t lane : {0, 1}) {
      for (int domain_size : DomainSizes(layout)) {
        process.Dispatch(6, false, lane, domain_size).Check();
      }
    }
    Groups::OfProcess().Release();
    const int descriptors = CountDescriptors();  // with those of a faster process
    for (int i = 0; i < 4; ++i) {
      CHECK_OK(calls.Next());
      Groups::OfProcess().Release();
    }
    for (int i = 0; i < 200 && CountDescriptors() > descriptors; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(CountDescriptors() <= descriptors);
    Groups::OfProcess().Shutdown();
  });
  forks.Await(60 + static_cast<double>(num_calls));  // the machine may be busy
}

// Checks that jax_ep.check() says who has died. Returns the number of new reports.
size_t CheckReports() {
  const std::vector<TimeoutReport> reports = TakeReports();
  for (const TimeoutReport& report : reports) CHECK(Contains(report.message, "has died"));
  return reports.size();
}

// Kills a process at a random moment. All others end, with an error that names it.
void TestKill(Layout layout, uint64_t seed) {
  constexpr double kDeadline = 60;  // the machine may be busy
  std::mt19937_64 random(seed);
  const bool by_ipc = layout.ranks_per_process == 1 && random() % 2 == 0;
  SharedExchange exchange;
  auto* const killed = SharedBetweenForks<std::atomic<int>>();
  auto* const num_ended = SharedBetweenForks<std::atomic<int>>();
  Forks forks(layout.num_processes, [&](int index) {
    Process process(layout, index, &exchange, seed);
    UseNetwork();
    if (by_ipc) process.transport.memories = {CudaIpcMemory()};
    RandomCalls calls(&process, layout, seed);
    Status status;
    for (int num_ended = 0; num_ended <= RandomCalls::kNumLanes;) {
      status = calls.Next();
      if (status.ok()) continue;
      if (Contains(status.message, "has died")) break;
      // A peer may have ended the call before this process knows why. jax_ep.check() waits for the
      // reason, and raises it. The lane's next call fails with it.
      ++num_ended;
      CHECK_FAILS(status, "a call has been ended");
      CHECK(CheckReports() > 0);
    }
    const std::string name = Concatenate("process ", *killed - 1, " (pid ");
    CHECK_FAILS(status, name);
    CHECK_FAILS(status, "has died");
    CheckReports();
    Groups::OfProcess().Release();  // returns at once
    for (int i = 0; i < 2; ++i) CHECK(!calls.Next().ok());
    // The one that is named must be the first that has ended.
    for (++*num_ended; *num_ended < layout.num_processes - 1;) std::this_thread::yield();
  });
  const int victim = static_cast<int>(random() % layout.num_processes);
  // Before that they do not know each other. Those of several hosts meet twice.
  while (!exchange.HasMet((layout.has_hosts ? 2 : 1) * layout.num_ranks())) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 400'000 * (random() % 4) / 3));
  *killed = victim + 1;
  forks.Kill(victim);
  forks.Await(kDeadline, victim);
}

// A process exits as soon as its own calls have ended. The others' need what it has sent last.
void TestExits(Layout layout, uint64_t seed) {
  SharedExchange exchange;
  Forks forks(layout.num_processes, [&](int index) {
    Process process(layout, index, &exchange, seed);
    UseNetwork();
    for (int num_tokens : {40, 6}) {
      process.Dispatch(num_tokens, false, 0, layout.ranks_per_process).Check();
    }
    Groups::OfProcess().Shutdown();
  });
  forks.Await(60);
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) {
  using namespace jax_ep::testing;
  uint64_t num_calls = 20, num_kills = 4, seed = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string_view option = argv[i];
    const uint64_t value = std::strtoull(argv[i + 1], nullptr, 10);
    if (option == kNetworkOption) network_folder = argv[i + 1];
    if (option == "--calls") num_calls = value;
    if (option == "--kills") num_kills = value;
    if (option == "--seed") seed = value;
  }
  if (seed == 0) seed = static_cast<uint64_t>(getpid());
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  RegisterKernels();
  return RunCases({{"random calls",
                    [=] {
                      for (Layout layout : kLayouts) TestRandomCalls(layout, num_calls, seed);
                    }},
                   {"random calls by CUDA IPC",
                    [=] {
                      for (Layout layout : {Layout{2, 1}, Layout{4, 1}}) {
                        TestRandomCalls(layout, num_calls / 8, seed, true);
                      }
                    }},
                   {"random calls of several hosts",
                    [=] {
                      if (network_folder.empty()) return;
                      for (Layout layout : kHosts) TestRandomCalls(layout, num_calls, seed);
                    }},
                   {"kills",
                    [=] {
                      for (uint64_t i = 0; i < num_kills; ++i) {
                        TestKill(kLayouts[i % std::size(kLayouts)], seed * 1000 + i);
                      }
                    }},
                   {"exits of hosts",
                    [=] {
                      for (uint64_t i = 0; i < num_kills && !network_folder.empty(); ++i) {
                        TestExits(kHosts[i % std::size(kHosts)], seed + i);
                      }
                    }},
                   {"kills of hosts",
                    [=] {
                      for (uint64_t i = 0; i < num_kills && !network_folder.empty(); ++i) {
                        TestKill(kHosts[i % std::size(kHosts)], seed * 1000 + i);
                      }
                    }}},
                  argc, argv);
}
