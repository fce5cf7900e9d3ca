// Tests groups that span processes, on the emulated CUDA runtime, with the kernels: random calls in
// several layouts, each result compared bit for bit; failures, each with an error that names both
// sides; and processes killed at random moments.
//
//   processes_test [--calls N] [--kills N] [--seed N] [--only NAME]
//
// Seed 0 is another one each time.
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "ffi/runtime/groups.h"
#include "tests/cpp/emulation/dispatch_program.h"
#include "tests/cpp/emulation/forks.h"
#include "tests/cpp/emulation/random_call.h"
#include "tests/cpp/emulation/register_kernels.h"
#include "tests/cpp/emulation/shared_transport.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

using testing::Contains;
using testing::DispatchProgram;
using testing::Forks;
using testing::LocalRanks;
using testing::RandomCall;
using testing::RandomCombine;
using testing::RandomDispatch;
using testing::RandomRedispatch;
using testing::Shape;
using testing::StreamOf;
using testing::Uniform;
using testing::Verdict;

using Seconds = std::chrono::duration<double>;

struct Layout {
  int num_processes;
  int ranks_per_process;
  int num_ranks() const { return num_processes * ranks_per_process; }
};
constexpr Layout kLayouts[] = {{2, 1}, {4, 1}, {2, 2}, {3, 2}};

// A process's side of a test.
class Process {
 public:
  Process(Layout layout, int index, testing::SharedExchange* exchange, uint64_t seed)
      : layout_(layout), index_(index), transport_{exchange, &memory} {
    emulation::settings.seed = seed * 31 + static_cast<uint64_t>(index);
    // Kernels share few CPUs with many others: only a test of deadlines has short ones.
    for (const char* name :
         {"JAX_EP_ENTRY_TIMEOUT_S", "JAX_EP_PROGRESS_TIMEOUT_S", "JAX_EP_WARN_AFTER_S"}) {
      setenv(name, "1000000", 1);
    }
  }

  LocalRanks local() const {
    return {index_ * layout_.ranks_per_process, layout_.ranks_per_process, &transport_,
            testing::SharedExchange::Communicator(0)};
  }

  DispatchProgram Dispatch(int num_tokens, bool allow_low_latency, int64_t lane = 0) {
    return {layout_.num_ranks(), num_tokens, allow_low_latency, 0, {lane, 2, 2}, local()};
  }

  testing::SharedMemory memory;

 private:
  const Layout layout_;
  const int index_;
  const Transport transport_;
};

// Calls that all processes make in the same random order, of random shapes. Workspaces grow.
class RandomCalls {
 public:
  RandomCalls(Process* process, Layout layout, uint64_t seed)
      : layout_(layout), local_(process->local()), random_(seed) {}

  // Makes a dispatch and calls with its plan, then looks at their results. Returns the first error.
  Status Next() {
    if (num_rounds_++ % kRoundsOfAProgram == 0) MakeProgram();
    for (const auto& call : calls_) call->Fill(random_);
    for (const auto& call : calls_) {
      if (Status status = Run(*call); !status.ok()) return status;
    }
    num_calls += calls_.size();
    for (int i = 0; i < local_.count; ++i) cudaStreamSynchronize(StreamOf(i, lane_));
    Status status;
    for (const auto& call : calls_) {
      for (int i = 0; i < local_.count; ++i) {
        std::string why;
        const Verdict verdict = call->Check(local_.first + i, &why);
        if (verdict == Verdict::kWrong) testing::Report(__FILE__, __LINE__, "a result", why);
        if (verdict == Verdict::kEnded) status = FailedPrecondition("a call has been ended");
      }
    }
    return status;
  }

  bool IsTimeToRelease() { return Uniform(random_, 0, 31) == 0; }

  uint64_t num_calls = 0;

 private:
  static constexpr int kRoundsOfAProgram = 4;
  static constexpr GroupKernels kKernels = {&LoadTransferKernels, &LaunchStartGeneration};

  void MakeProgram() {
    const harness::Options options = {.tiny = true};
    calls_.clear();
    lane_ = Uniform(random_, 0, 1);
    auto dispatch = std::make_unique<RandomDispatch>(
        harness::RandomShape(random_, layout_.num_ranks(), options), lane_, kKernels, local_);
    RandomDispatch* const of = dispatch.get();
    calls_.push_back(std::move(dispatch));
    for (int i = Uniform(random_, 1, 3); i > 0; --i) {
      const Shape shape = harness::Varied(random_, of->shape, options);
      if (Uniform(random_, 0, 1)) {
        calls_.push_back(std::make_unique<RandomRedispatch>(shape, of, lane_, kKernels, local_));
      } else {
        calls_.push_back(std::make_unique<RandomCombine>(shape, of, lane_, kKernels, local_));
      }
    }
  }

  Status Run(RandomCall& call) const {
    const int64_t run = testing::NextRun();
    for (int i = 0; i < local_.count; ++i) {
      if (!call.site.HasRank(i)) call.site.Announce(run);
    }
    std::vector<Status> statuses(local_.count);
    std::vector<std::jthread> threads;
    for (int i = 0; i < local_.count; ++i) {
      threads.emplace_back([&, i] {
        cudaSetDevice(i);
        const cudaStream_t stream = StreamOf(i, lane_);
        const int rank = local_.first + i;
        statuses[i] = call.site.Enter(
            run, {i, stream, rank, call.workspace_bytes(), {}, local_.communicator, "a call"});
        if (statuses[i].ok()) statuses[i] = call.Launch(rank, call.site.control(i), stream);
      });
    }
    threads.clear();
    return statuses[0];
  }

  const Layout layout_;
  const LocalRanks local_;
  testing::Random random_;
  uint64_t num_rounds_ = 0;
  int64_t lane_ = 0;
  std::vector<std::unique_ptr<RandomCall>> calls_;
};

void TestRandomCalls(Layout layout, uint64_t num_calls, uint64_t seed) {
  testing::SharedExchange exchange;
  Forks forks(layout.num_processes, [&](int index) {
    Process process(layout, index, &exchange, seed);
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
  testing::SharedExchange exchange;
  auto* const killed = testing::SharedBetweenForks<std::atomic<int>>();
  auto* const num_ended = testing::SharedBetweenForks<std::atomic<int>>();
  Forks forks(layout.num_processes, [&](int index) {
    Process process(layout, index, &exchange, seed);
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

// A process exits in order. The other one waits for it in vain, and learns that it has exited.
void TestOrderlyExit() {
  InTwo([](Process& process, int index) {
    DispatchProgram program = process.Dispatch(6, false);
    program.Check();
    if (index == 1) return Groups::OfProcess().Shutdown();
    CHECK_OK(program.Launch(0));
    program.Synchronize();
    CHECK(program.IsSafe(0));
    for (const Status& status : program.Run()) CHECK_FAILS(status, "has exited");
    for (const Status& status : process.Dispatch(40, false).Run()) CHECK(!status.ok());
  });
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
  std::string only;
  uint64_t num_calls = 20, num_kills = 4, seed = 1;
  for (int i = 1; i + 1 < argc; i += 2) {
    const uint64_t value = std::strtoull(argv[i + 1], nullptr, 10);
    if (std::strcmp(argv[i], "--only") == 0) only = argv[i + 1];
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
               {"kills",
                [&] {
                  for (uint64_t i = 0; i < num_kills; ++i) {
                    TestKill(kLayouts[i % std::size(kLayouts)], seed * 1000 + i);
                  }
                }},
               {"another call", TestOtherCall},
               {"other sizes", TestOtherSizes},
               {"nobody comes", TestNobodyComes},
               {"every process reports", TestEveryProcessReports},
               {"memory failures", TestMemoryFailures},
               {"another host, another version", TestOtherHostAndVersion},
               {"an exit in order", TestOrderlyExit},
               {"a blocked process ends", TestBlockedProcessEnds}};
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  for (const auto& test : tests) {
    if (!only.empty() && only != test.name) continue;
    const auto start = std::chrono::steady_clock::now();
    test.run();
    std::printf("%s: %.1f s%s\n", test.name,
                Seconds(std::chrono::steady_clock::now() - start).count(),
                testing::failures == 0 ? "" : ", FAILED");
  }
  return testing::Finish();
}
