// Tests groups that span processes, on the emulated CUDA runtime, with the kernels: random calls in
// several layouts, each result compared bit for bit; failures, each with an error that names both
// sides; and processes killed at random moments.
//
//   processes_test [--calls N] [--kills N] [--seed N] [--only NAME]...
//
// Seed 0 is another one each time. NAME is the beginning of a test's name.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/runtime/groups.h"
#include "ffi/runtime/processes/mesh_processes.h"
#include "tests/cpp/emulation/dispatch_program.h"
#include "tests/cpp/emulation/forks.h"
#include "tests/cpp/emulation/process.h"
#include "tests/cpp/emulation/register_kernels.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

using testing::Contains;
using testing::DispatchProgram;
using testing::Forks;
using testing::Layout;
using testing::LocalRanks;
using testing::Process;
using testing::RandomCalls;
using testing::StreamOf;

using Seconds = std::chrono::duration<double>;

constexpr Layout kLayouts[] = {{2, 1}, {4, 1}, {2, 2}, {3, 2}};

void TestRandomCalls(Layout layout, uint64_t num_calls, uint64_t seed, bool by_ipc = false) {
  testing::SharedExchange exchange;
  Forks forks(layout.num_processes, [&](int index) {
    Process process(layout, index, &exchange, seed);
    if (by_ipc) process.transport.memories = {CudaIpcMemory()};
    RandomCalls calls(&process, layout, seed);
    while (calls.num_calls < num_calls && testing::failures == 0) {
      CHECK_OK(calls.Next());
      if (calls.IsTimeToRelease()) Groups::OfProcess().Release();
    }
    // Generations without workspaces are left, one for each lane. They do not become more.
    for (int64_t lane : {0, 1}) process.Dispatch(6, false, lane).Check();
    Groups::OfProcess().Release();
    const int descriptors = testing::CountDescriptors();  // with those of a faster process
    for (int i = 0; i < 4; ++i) {
      CHECK_OK(calls.Next());
      Groups::OfProcess().Release();
    }
    for (int i = 0; i < 200 && testing::CountDescriptors() > descriptors; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(testing::CountDescriptors() <= descriptors);
    Groups::OfProcess().Shutdown();
  });
  forks.Await(20 + static_cast<double>(num_calls));
}

// Kills a process at a random moment. All others end, with an error that names it.
void TestKill(Layout layout, uint64_t seed) {
  constexpr double kDeadline = 10;  // the machine may be busy
  std::mt19937_64 random(seed);
  const bool by_ipc = layout.ranks_per_process == 1 && random() % 2 == 0;
  testing::SharedExchange exchange;
  auto* const killed = testing::SharedBetweenForks<std::atomic<int>>();
  auto* const num_ended = testing::SharedBetweenForks<std::atomic<int>>();
  Forks forks(layout.num_processes, [&](int index) {
    Process process(layout, index, &exchange, seed);
    if (by_ipc) process.transport.memories = {CudaIpcMemory()};
    RandomCalls calls(&process, layout, seed);
    Status status;
    for (int errors = 0; errors < 2;) {
      status = calls.Next();
      // A call that was running when the process died has no result; the next one says why.
      if (status.ok()) continue;
      ++errors;
      if (Contains(status.message, "has died")) break;
    }
    const std::string name = Concatenate("process ", *killed - 1, " (pid ");
    CHECK_FAILS(status, name);
    CHECK_FAILS(status, "has died");
    Groups::OfProcess().PostReports(ProcessMailbox());
    for (const TimeoutReport& report : ProcessMailbox().Take()) {
      CHECK(Contains(report.message, "has died"));
    }
    Groups::OfProcess().Release();  // returns at once
    for (int i = 0; i < 2; ++i) CHECK(!calls.Next().ok());
    // The one that is named must be the first that has ended.
    for (++*num_ended; *num_ended < layout.num_processes - 1;) std::this_thread::yield();
  });
  const int victim = static_cast<int>(random() % layout.num_processes);
  // Before that they do not know each other.
  while (!exchange.HasMet(layout.num_ranks())) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  std::this_thread::sleep_for(std::chrono::microseconds(random() % 400'000 * (random() % 4) / 3));
  *killed = victim + 1;
  forks.Kill(victim);
  forks.Await(kDeadline, victim);
}

using RankGroups = std::vector<std::vector<int64_t>>;

// Runs a call of several groups, some of which span processes, again and again.
void RunGroups(Process& process, const RankGroups& groups, int num_tokens, uintptr_t mesh) {
  const LocalRanks local = process.local();
  const auto is_local = [&](int64_t id) {
    return id >= local.first && id < local.first + local.count;
  };
  const auto site =
      std::make_shared<CallSite>(groups, 0, DispatchProgram::kKernels, local.transport);
  struct LocalDevice {
    DispatchProgram* program;
    int rank;
  };
  std::vector<std::unique_ptr<DispatchProgram>> programs;
  std::map<int, LocalDevice> devices;
  for (const std::vector<int64_t>& ids : groups) {
    const auto first = std::find_if(ids.begin(), ids.end(), is_local);
    if (first == ids.end()) continue;
    const int rank = static_cast<int>(first - ids.begin());
    const int count = static_cast<int>(std::count_if(ids.begin(), ids.end(), is_local));
    const int device = static_cast<int>(*first) - local.first;
    programs.push_back(std::make_unique<DispatchProgram>(
        static_cast<int>(ids.size()), num_tokens, num_tokens < 10, device, testing::Lane{0, 2, 2},
        LocalRanks{rank, count, local.transport}));
    programs.back()->site = site;
    for (int i = 0; i < count; ++i) devices[device + i] = {programs.back().get(), rank + i};
  }
  for (int repeat = 0; repeat < 3; ++repeat) {
    const int64_t run = testing::NextRun();
    for (int i = 0; i < local.count; ++i) {
      if (!site->HasRank(i)) site->Announce(run);
    }
    std::vector<std::jthread> threads;
    for (const auto& [device, of] : devices) {
      threads.emplace_back([&, device, of] {
        cudaSetDevice(device);
        const Status status = site->Enter(run, {device,
                                                StreamOf(device),
                                                local.first + device,
                                                of.program->workspace_bytes(),
                                                {},
                                                testing::SharedExchange::Communicator(mesh),
                                                "a call"});
        CHECK_OK(status);
        if (status.ok()) CHECK_OK(of.program->Launch(of.rank));
      });
    }
    threads.clear();
    for (const auto& [device, of] : devices) {
      cudaStreamSynchronize(StreamOf(device));
      CHECK(of.program->IsRight(of.rank));
    }
    for (auto& program : programs) program->Clear();
  }
}

void TestSeveralGroups() {
  const struct {
    Layout layout;
    RankGroups groups;
  } cases[] = {{{2, 2}, {{0, 2}, {1, 3}}},           // all span processes
               {{2, 2}, {{0, 1}, {2, 3}}},           // none does
               {{2, 2}, {{2, 0}, {3, 1}}},           // unlike the order of processes
               {{3, 2}, {{0, 1, 2}, {3, 4, 5}}},     // a process has a part of two
               {{2, 3}, {{0, 1}, {2, 3}, {4, 5}}}};  // some do
  uintptr_t mesh = 0;
  testing::SharedExchange exchange;
  for (const auto& [layout, groups] : cases) {
    Forks forks(layout.num_processes, [&](int index) {
      Process process(layout, index, &exchange, mesh + 1);
      for (int num_tokens : {6, 60}) {
        RunGroups(process, groups, num_tokens, mesh);
        Groups::OfProcess().Release();
      }
    });
    forks.Await(30);
    ++mesh;
  }
}

// A mesh over two hosts runs, as each group is on one of them.
void TestTwoHosts() {
  testing::SharedExchange exchange;
  Forks forks(4, [&](int index) {
    if (index >= 2) {
      exchange.change = [](Identity* identity) { std::strcpy(identity->boot_id, "elsewhere"); };
    }
    Process process({4, 1}, index, &exchange, 1);
    RunGroups(process, {{0, 1}, {3, 2}}, 6, 0);
    Groups::OfProcess().Release();
  });
  forks.Await(30);
}

// Runs `child` in two processes of one rank each.
void InTwo(const std::function<void(Process& process, int index)>& child) {
  testing::SharedExchange exchange;
  Forks forks(2, [&](int index) {
    Process process({2, 1}, index, &exchange, 1);
    child(process, index);
  });
  forks.Await(30);
}

// The group works again after a release.
void CheckAfterRelease(Process& process) {
  Groups::OfProcess().Release();
  ProcessMailbox().Take();
  process.Dispatch(6, false).Check();
  Groups::OfProcess().Release();
}

void TestOtherCall() {
  InTwo([](Process& process, int index) {
    DispatchProgram program = process.Dispatch(6, false);
    program.call = index == 0 ? "dispatch of 6 tokens" : "combine of 7 tokens";
    for (const Status& status : program.Run()) {
      CHECK_FAILS(status, "rank 0 in process 0 (pid ");
      CHECK_FAILS(status, "runs dispatch of 6 tokens, while rank 1 in process 1 (pid ");
      CHECK_FAILS(status, "runs combine of 7 tokens");
    }
    CheckAfterRelease(process);
  });
}

// A message that one process cannot send is an error in both.
void TestCannotTell() {
  InTwo([](Process& process, int index) {
    DispatchProgram program = process.Dispatch(6, false);
    program.call = std::string(index == 0 ? kMaxMessageBytes : 1, 'x');
    for (const Status& status : program.Run()) {
      CHECK_FAILS(status, "rank 0 in process 0");
      CHECK_FAILS(status, "cannot tell rank 1 in process 1");
    }
    CheckAfterRelease(process);
  });
}

void TestOtherSizes() {
  InTwo([](Process& process, int index) {
    for (const Status& status : process.Dispatch(index == 0 ? 6 : 600, false).Run()) {
      CHECK_FAILS(status, "rank 0 in process 0");
      CHECK_FAILS(status, "and rank 1 in process 1");
    }
    CheckAfterRelease(process);
  });
}

void TestNobodyComes() {
  InTwo([](Process& process, int index) {
    setenv("JAX_EP_ENTRY_TIMEOUT_S", index == 0 ? "1" : "1000000", 1);
    DispatchProgram program = process.Dispatch(6, false);
    program.Check();
    DispatchProgram second = process.Dispatch(40, false);
    if (index == 0) {
      for (const Status& status : second.Run()) {
        CHECK_FAILS(status, "has waited 1 s for rank 1 in process 1");
      }
    } else {
      // Its own call, which the other process does not make, ends with that failure.
      CHECK_OK(program.Launch(1));
      program.Synchronize();
      CHECK(program.IsSafe(1));
      for (const Status& status : second.Run()) CHECK_FAILS(status, "has waited 1 s for rank 1");
    }
    CheckAfterRelease(process);
  });
}

// A kernel of one process times out: the other process reports it, too.
void TestEveryProcessReports() {
  InTwo([](Process& process, int index) {
    setenv("JAX_EP_ENTRY_TIMEOUT_S", index == 0 ? "5" : "1000000", 1);
    DispatchProgram program = process.Dispatch(6, false);
    program.Check();
    if (index == 0) {
      CHECK_OK(program.Launch(0));
      program.Synchronize();
      CHECK(program.IsSafe(0));
    }
    bool found = false;
    for (int i = 0; i < 500 && !found; ++i) {
      Groups::OfProcess().PostReports(ProcessMailbox());
      for (const TimeoutReport& report : ProcessMailbox().Take()) {
        found |= index == 0 ? report.phase == "dispatch.entry"
                            : Contains(report.message, "rank 0 in process 0") &&
                                  Contains(report.message, "waited for rank 1 in dispatch.entry");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(found);
    CheckAfterRelease(process);
  });
}

// One process has no memory for both generations, or for none of them; or cannot map the other's.
void TestMemoryFailures() {
  InTwo([](Process& process, int index) {
    DispatchProgram small = process.Dispatch(6, false);
    small.Check();
    DispatchProgram large = process.Dispatch(6000, false);
    if (index == 1) process.memory.fails_device = 0;
    process.memory.free_bytes = size_t{1} << 20;
    for (const Status& status : large.Run()) {
      CHECK_FAILS(status, "rank 1 in process 1");
      CHECK_FAILS(status, "out of memory on GPU 0");
    }
    process.memory.fails_device = -1;
    small.Check();
    process.memory.fails_import = index == 0;
    for (const Status& status : large.Run()) {
      CHECK_FAILS(status, "rank 0 in process 0");
      CHECK_FAILS(status, "the memory of rank 1 cannot be used: importing its workspace: no luck");
    }
    process.memory.fails_import = false;
    small.Check();
    large.Check();
    CheckAfterRelease(process);
  });
}

// Memory of the first kind fails in one process: all of them take the next kind. Each call and each
// A communicator may have the address of one that has ended.
void TestMeshesAreForgotten() {
  struct Counting : Exchange {
    Status AllGather(const std::vector<Endpoint>& local, const Identity& self, size_t num_devices,
                     std::vector<Identity>* identities) override {
      ++num_gathers;
      identities->assign(num_devices, local[0].IdentityIn(self));
      return {};
    }
    int num_gathers = 0;
  };
  Forks forks(1, [](int) {
    Counting exchange;
    std::vector<Identity> identities;
    for (const int expected : {1, 1, 2}) {
      if (expected == 2) ForgetMeshes();
      CHECK_OK(FindMeshProcesses(
          exchange, {{0, 0, testing::SharedExchange::Communicator(0), "gpu"}}, 2, &identities));
      CHECK(exchange.num_gathers == expected && identities.size() == 2);
    }
  });
  forks.Await(30);
}

// release leaves as many descriptors and bytes as the one before.
void TestNextKindOfMemory() {
  InTwo([](Process& process, int index) {
    process.memory.fails_import = index == 1;
    process.Dispatch(6, false).Check();
    process.memory.fails_import = false;
    process.Dispatch(600, false).Check();
    Groups::OfProcess().Release();
    const int descriptors = testing::CountDescriptors();
    const size_t bytes = emulation::AllocatedBytes();
    for (int i = 0; i < 3; ++i) {
      process.Dispatch(600, false).Check();
      process.Dispatch(1200, false).Check();
      CHECK(emulation::AllocatedBytes() > bytes);
      Groups::OfProcess().Release();
      CHECK(emulation::AllocatedBytes() == bytes);
    }
    CHECK(testing::CountDescriptors() <= descriptors + 1);  // the other's, just sent
    CheckAfterRelease(process);
  });
}

// No kind of memory works: the error names both.
void TestNoKindOfMemory() {
  InTwo([](Process& process, int index) {
    process.memory.fails_import = index == 0;
    emulation::faults.fails_ipc = index == 1;
    for (int i = 0; i < 2; ++i) {
      for (const Status& status : process.Dispatch(6, false).Run()) {
        CHECK_FAILS(status, "rank 1 in process 1");
        CHECK_FAILS(status,
                    "the memory of rank 0 cannot be used: importing its workspace "
                    "(cudaIpcOpenMemHandle)");
        CHECK_FAILS(status, "Before, by memfd: rank 0 in process 0");
      }
    }
    process.memory.fails_import = false;
    process.Dispatch(6, false).Check();
    CheckAfterRelease(process);
  });
}

void TestOtherHostAndVersion() {
  testing::SharedExchange exchange;
  for (const bool is_version : {false, true}) {
    Forks forks(2, [&](int index) {
      exchange.change = index == 0 ? nullptr
                        : is_version
                            ? [](Identity* identity) { std::strcpy(identity->version, "9.9"); }
                            : [](Identity* identity) {
                                std::strcpy(identity->boot_id, "elsewhere");
                                std::strcpy(identity->host, "node9");
                              };
      Process process({2, 1}, index, &exchange, 1);
      for (const Status& status : process.Dispatch(6, false).Run()) {
        CHECK_FAILS(status, is_version ? "9.9" : "on node9)");
        CHECK_FAILS(status, is_version ? "Install the same version" : "implementation=\"xla\"");
      }
    });
    forks.Await(30);
    new (&exchange) testing::SharedExchange;
  }
}

// One process makes a call, while the other one releases.
void TestReleaseInstead() {
  InTwo([](Process& process, int index) {
    process.Dispatch(6, false).Check();
    if (index == 1) return CheckAfterRelease(process);
    for (const Status& status : process.Dispatch(40, false).Run()) {
      CHECK_FAILS(status, "rank 0 in process 0");
      CHECK_FAILS(status, "while rank 1 in process 1");
      CHECK_FAILS(status, "is in jax_ep.release()");
    }
    CheckAfterRelease(process);
  });
}

// A process exits in order, which takes a while. The other one waits for it in vain, and learns
// that it has exited.
void TestOrderlyExit() {
  auto* const is_over = testing::SharedBetweenForks<std::atomic<bool>>();
  InTwo([&](Process& process, int index) {
    DispatchProgram program = process.Dispatch(6, false);
    program.Check();
    if (index == 1) {
      Groups::OfProcess().Shutdown();
      while (!*is_over) std::this_thread::yield();
      return;
    }
    CHECK_OK(program.Launch(0));
    program.Synchronize();
    CHECK(program.IsSafe(0));
    for (const Status& status : program.Run()) CHECK_FAILS(status, "has exited");
    for (const Status& status : process.Dispatch(40, false).Run()) CHECK(!status.ok());
    *is_over = true;
  });
}

// A process that dies may leave a fork behind, which neither hides its death nor speaks for it.
void TestForkOutlives() {
  auto* const is_right = testing::SharedBetweenForks<std::atomic<bool>>();
  auto* const is_over = testing::SharedBetweenForks<std::atomic<bool>>();
  testing::SharedExchange exchange;
  Forks forks(2, [&](int index) {
    Process process({2, 1}, index, &exchange, 1);
    process.Dispatch(6, false).Check();
    if (index == 1) {
      if (fork() == 0) {
        Connections::OfProcess().Leave();
        for (int i = 0; i < 2000 && !*is_over; ++i) usleep(10'000);
        _exit(0);
      }
      while (!*is_right) std::this_thread::yield();
      raise(SIGKILL);
    }
    *is_right = true;
    for (const Status& status : process.Dispatch(40, false).Run()) {
      CHECK_FAILS(status, "rank 1 in process 1");
      CHECK_FAILS(status, "has died");
    }
    *is_over = true;
  });
  forks.Await(15, 1);
}

// A kernel of the tests that nobody ends, as a collective of XLA.
struct Nothing {};
void EndlessKernel(Nothing) {
  while (true) std::this_thread::yield();
}

void TestBlockedProcessEnds() {
  testing::SharedExchange exchange;
  auto* const is_right = testing::SharedBetweenForks<std::atomic<bool>>();
  const auto start = std::chrono::steady_clock::now();
  Forks forks(2, [&](int index) {
    Process process({2, 1}, index, &exchange, 1);
    setenv("JAX_EP_PEER_DEATH_EXIT_S", "0.5", 1);
    process.Dispatch(6, false).Check();
    if (index == 1) {
      while (!*is_right) std::this_thread::yield();
      raise(SIGKILL);
    }
    *is_right = true;
    Nothing nothing;
    void* arguments[] = {&nothing};
    const auto kernel = reinterpret_cast<const void*>(EndlessKernel);
    CHECK(cudaLaunchKernel(kernel, 1, 32, arguments, 0, testing::StreamOf(0)) == cudaSuccess);
    cudaStreamSynchronize(testing::StreamOf(0));
  });
  int status = 0;
  waitpid(forks.pids()[0], &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 70);
  waitpid(forks.pids()[1], &status, 0);
  CHECK(Seconds(std::chrono::steady_clock::now() - start).count() < 10);
}

}  // namespace
}  // namespace jax_ep

int main(int argc, char** argv) {
  using namespace jax_ep;
  std::vector<std::string> only;
  uint64_t num_calls = 20, num_kills = 4, seed = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    const uint64_t value = std::strtoull(argv[i + 1], nullptr, 10);
    if (std::strcmp(argv[i], "--only") == 0) only.push_back(argv[i + 1]);
    if (std::strcmp(argv[i], "--calls") == 0) num_calls = value;
    if (std::strcmp(argv[i], "--kills") == 0) num_kills = value;
    if (std::strcmp(argv[i], "--seed") == 0) seed = value;
  }
  if (seed == 0) seed = static_cast<uint64_t>(getpid());
  RegisterKernels();
  emulation::Register(reinterpret_cast<const void*>(EndlessKernel), EndlessKernel);
  const struct {
    const char* name;
    std::function<void()> run;
  } tests[] = {{"random calls",
                [&] {
                  for (Layout layout : kLayouts) TestRandomCalls(layout, num_calls, seed);
                }},
               {"random calls by CUDA IPC",
                [&] {
                  for (Layout layout : {Layout{2, 1}, Layout{4, 1}}) {
                    TestRandomCalls(layout, num_calls / 8, seed, true);
                  }
                }},
               {"kills",
                [&] {
                  for (uint64_t i = 0; i < num_kills; ++i) {
                    TestKill(kLayouts[i % std::size(kLayouts)], seed * 1000 + i);
                  }
                }},
               {"several groups", TestSeveralGroups},
               {"two hosts", TestTwoHosts},
               {"meshes are forgotten", TestMeshesAreForgotten},
               {"another call", TestOtherCall},
               {"a message that is too long", TestCannotTell},
               {"other sizes", TestOtherSizes},
               {"nobody comes", TestNobodyComes},
               {"every process reports", TestEveryProcessReports},
               {"memory failures", TestMemoryFailures},
               {"the next kind of memory", TestNextKindOfMemory},
               {"no kind of memory", TestNoKindOfMemory},
               {"another host, another version", TestOtherHostAndVersion},
               {"a release instead of a call", TestReleaseInstead},
               {"an exit in order", TestOrderlyExit},
               {"a fork outlives its parent", TestForkOutlives},
               {"a blocked process ends", TestBlockedProcessEnds}};
  int num_run = 0;
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  for (const auto& test : tests) {
    const auto begins = [&](const std::string& name) {
      return std::string_view(test.name).starts_with(name);
    };
    if (!only.empty() && !std::any_of(only.begin(), only.end(), begins)) continue;
    ++num_run;
    const auto start = std::chrono::steady_clock::now();
    test.run();
    std::printf("%s: %.1f s%s\n", test.name,
                Seconds(std::chrono::steady_clock::now() - start).count(),
                testing::failures == 0 ? "" : ", FAILED");
  }
  CHECK(num_run > 0);
  return testing::Finish();
}
