// Tests processes that exit or die while another one waits for them.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <thread>
#include <vector>

#include "tests/cpp/emulation/obstacle.h"
#include "tests/cpp/emulation/processes/delayed_ends.h"
#include "tests/cpp/emulation/processes/process.h"

namespace jax_ep::testing {
namespace {

// A process exits in order, which takes a while. The other one waits for it in vain, and learns
// that it has exited.
void TestOrderlyExit() {
  auto* const is_over = SharedBetweenForks<std::atomic<bool>>();
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
  auto* const is_right = SharedBetweenForks<std::atomic<bool>>();
  auto* const is_over = SharedBetweenForks<std::atomic<bool>>();
  SharedExchange exchange;
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

// A peer ends a call before this process knows that a third one has died. jax_ep.check() waits for
// the reason.
void TestEndedByPeer() {
  auto* const num_launched = SharedBetweenForks<std::atomic<int>>();
  auto* const is_over = SharedBetweenForks<std::atomic<bool>>();
  SharedExchange exchange;
  Forks forks(3, [&](int index) {
    auto* const ends = index == 0 ? new DelayedEnds : nullptr;
    Process process({3, 1}, index, &exchange, 1);
    DispatchProgram program = process.Dispatch(6, false);
    program.Check();
    if (index == 2) {
      while (*num_launched < 2) std::this_thread::yield();
      raise(SIGKILL);
    }
    CHECK_OK(program.Launch(index));
    ++*num_launched;
    program.Synchronize();
    CHECK(program.IsSafe(index));
    if (index == 1) {
      while (!*is_over) std::this_thread::yield();
      return;
    }
    ends->Tell();
    const std::vector<TimeoutReport> reports = TakeReports();
    CHECK(reports.size() == 1);
    for (const TimeoutReport& report : reports) {
      CHECK(Contains(report.message, "rank 2 in process 2"));
      CHECK(Contains(report.message, "has died"));
    }
    for (const Status& status : program.Run()) CHECK_FAILS(status, "has died");
    *is_over = true;
  });
  forks.Await(15, 2);
}

// A kernel that waits for the dead process, as a collective of XLA, is never removed.
void TestBlockedProcessEnds() {
  SharedExchange exchange;
  auto* const is_right = SharedBetweenForks<std::atomic<bool>>();
  Forks forks(2, [&](int index) {
    Process process({2, 1}, index, &exchange, 1);
    setenv("JAX_EP_PEER_DEATH_EXIT_S", "0.5", 1);
    process.Dispatch(6, false).Check();
    if (index == 1) {
      while (!*is_right) std::this_thread::yield();
      raise(SIGKILL);
    }
    *is_right = true;
    Obstacle obstacle(StreamOf(0));
    cudaStreamSynchronize(StreamOf(0));
  });
  const double seconds = Seconds([&] {
    int status = 0;
    waitpid(forks.pids()[0], &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 70);
    waitpid(forks.pids()[1], &status, 0);
  });
  CHECK(seconds < 10);
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) {
  using namespace jax_ep::testing;
  RegisterKernels();
  Obstacle::Register();
  return RunCases({{"an exit in order", TestOrderlyExit},
                   {"a fork outlives its parent", TestForkOutlives},
                   {"a peer ends a call", TestEndedByPeer},
                   {"a blocked process ends", TestBlockedProcessEnds}},
                  argc, argv);
}
