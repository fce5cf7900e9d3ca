// Tests groups whose calls go over several NVLink domains: growth, release, lanes, claims and ends.
//
//   domain_groups_test [--only NAME] [--network]
//
//   --network   joins the domains by a network on which puts overtake each other
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <set>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/cpp/emulation/reports.h"
#include "tests/cpp/emulation/runtime/fixture.h"
#include "tests/cpp/emulation/runtime/late_networks.h"

namespace jax_ep::testing {
namespace {

constexpr int kMore = 60;  // tokens; the workspaces grow

// Calls that hang end after so many seconds.
constexpr const char* kLong = "30";
void SetDeadlines(const char* seconds) {
  setenv("JAX_EP_ENTRY_TIMEOUT_S", seconds, 1);
  setenv("JAX_EP_PROGRESS_TIMEOUT_S", seconds, 1);
}

DispatchProgram OfDomains(int num_ranks, int domain_size, int num_tokens, int64_t lane = 0) {
  return {num_ranks, num_tokens, true, 0, {lane, 2, 2}, {}, domain_size};
}

// The rails' rings go on over calls of all sizes, and begin anew with each generation.
void TestCallsOfAllSizes() {
  const struct {
    int ranks, domain_size;
  } groups[] = {{2, 1}, {3, 1}, {4, 2}, {6, 3}};
  for (const auto& [ranks, domain_size] : groups) {
    Restart();
    DispatchProgram small = OfDomains(ranks, domain_size, kSmall);
    DispatchProgram medium = OfDomains(ranks, domain_size, kMore);
    for (int i = 0; i < 2; ++i) {
      small.Check();
      medium.Check();
    }
    CHECK(Groups::OfProcess().Release() > 0);
    small.Check();
    OfDomains(ranks, domain_size, 2 * kMore).Check();
  }
}

// Calls of one level, and of domains of other sizes, are those of other groups: they may alternate.
void TestOtherLevels() {
  Restart();
  DispatchProgram one_level = OfDomains(4, 0, kSmall), pairs = OfDomains(4, 2, kSmall),
                  rails = OfDomains(4, 1, kSmall);
  for (int i = 0; i < 3; ++i) {
    for (DispatchProgram* program : {&one_level, &pairs, &rails}) {
      program->Clear();
      for (const Status& status : program->Run()) CHECK_OK(status);
    }
    pairs.Synchronize();
    for (int r = 0; r < 4; ++r) {
      CHECK(one_level.IsRight(r) && pairs.IsRight(r) && rails.IsRight(r));
    }
  }
}

// Two lanes run at once, launched in opposite orders on half of the GPUs.
void TestLanes() {
  Restart();
  DispatchProgram first = OfDomains(4, 2, kMore, 0), second = OfDomains(4, 2, kMore, 1);
  for (int round = 0; round < 4; ++round) {
    const int64_t runs[] = {NextRun(), NextRun()};
    for (const Status& status : first.OnAll([&](int r) {
           Status status = first.Enter(runs[0], r);
           if (status.ok()) status = second.Enter(runs[1], r);
           if (status.ok()) status = (r % 2 == 0 ? first : second).Launch(r);
           std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
           return status.ok() ? (r % 2 == 0 ? second : first).Launch(r) : status;
         })) {
      CHECK_OK(status);
    }
    first.Synchronize();
    second.Synchronize();
    for (int r = 0; r < 4; ++r) CHECK(first.IsRight(r) && second.IsRight(r));
  }
}

// The host ends waits for a device that makes no call, wherever it is.
void TestHostEndsAWait() {
  for (int missing : {0, 1, 3}) {
    Restart();
    DispatchProgram program = OfDomains(4, 2, kSmall);
    program.Check();
    for (int r = 0; r < 4; ++r) {
      if (r != missing) CHECK_OK(program.Launch(r));
    }
    program.site->Abort(missing, "no luck");
    program.Synchronize();
    for (int r = 0; r < 4; ++r) {
      if (r == missing) continue;
      CHECK(program.IsSafe(r));
      CHECK(program.status(r) == static_cast<int>(Outcome::kHostAbort));
    }
    for (const Status& status : program.Run()) CHECK_FAILS(status, "no luck");
  }
}

// Deadlines end calls that wait for such a device. An error names a rank that is missed.
void TestDeadlines() {
  SetDeadlines("1");  // long enough for a call without a fault on a busy machine
  for (int missing : {0, 5}) {
    Restart();
    DispatchProgram program = OfDomains(6, 2, kSmall);
    program.Check();
    for (int r = 0; r < 6; ++r) {
      if (r != missing) CHECK_OK(program.Launch(r));
    }
    CHECK(Seconds([&] { program.Synchronize(); }) < 20);
    for (int r = 0; r < 6; ++r) {
      if (r == missing) continue;
      CHECK(program.IsSafe(r) && program.status(r) == static_cast<int>(Outcome::kTimeout));
    }
    for (const Status& status : program.Run()) CHECK_FAILS(status, "waited for rank");
  }
  SetDeadlines(kLong);
  Restart();
  OfDomains(6, 2, kSmall).Check();
}

// At exit, and for a release, nobody comes.
void TestNobodyComes() {
  Restart();
  DispatchProgram program = OfDomains(4, 2, kSmall);
  program.Check();
  for (int r : {0, 2}) CHECK_OK(program.Launch(r));
  CHECK(Seconds([&] { Groups::OfProcess().Drain(0.01, "the test ends"); }) < 20);
  program.Synchronize();
  CHECK(program.IsSafe(0) && program.IsSafe(2));
  Restart();
  program.Check();
}

// The workspaces grow, and a generation starts where devices make no call of the one before. Their
// peers, which wait for that call, learn that they have left: in the same domain, and over rails.
void TestRanksLeaveAGeneration() {
  SetDeadlines("5");
  for (int domain_size : {0, 1, 2}) {
    for (const std::set<int>& missing : {std::set{0}, {3}, {2, 3}}) {
      Restart();
      DispatchProgram small = OfDomains(4, domain_size, kSmall);
      DispatchProgram more = OfDomains(4, domain_size, kMore);
      small.Check();
      for (int r = 0; r < 4; ++r) {
        if (!missing.contains(r)) CHECK_OK(small.Launch(r));
      }
      const int64_t run = NextRun();
      for (const Status& status : more.OnAll([&](int r) { return more.Enter(run, r); })) {
        CHECK_OK(status);
      }
      small.Synchronize();
      for (int r = 0; r < 4; ++r) {
        if (missing.contains(r)) continue;
        CHECK(small.IsSafe(r) && small.status(r) == static_cast<int>(Outcome::kMismatch));
      }
    }
  }
  SetDeadlines(kLong);
}

// Two calls of a rank at the same time: each is whole or fails.
void TestTwoCallsAtOnce() {
  for (int round = 0; round < 6; ++round) {
    Restart();
    DispatchProgram first = OfDomains(4, 2, kMore), second = OfDomains(4, 2, kSmall);
    first.Check();
    second.Check();
    std::vector<cudaStream_t> other(4);
    for (int r = 0; r < 4; ++r) {
      cudaSetDevice(r);
      cudaStreamCreateWithFlags(&other[r], cudaStreamNonBlocking);
      CHECK_OK(first.Launch(r));
      std::this_thread::sleep_for(std::chrono::microseconds(500 * round));
      CHECK_OK(second.Launch(r, other[r]));
    }
    first.Synchronize();
    for (cudaStream_t stream : other) cudaStreamDestroy(stream);
    for (int r = 0; r < 4; ++r) {
      CHECK(first.IsRight(r) || first.IsSafe(r));
      CHECK(second.IsRight(r) || second.IsSafe(r));
    }
  }
  Restart();
  OfDomains(4, 2, kSmall).Check();
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) {
  using namespace jax_ep::testing;
  RegisterKernels();
  SetDeadlines(kLong);
  const bool has_network =
      std::find(argv, argv + argc, std::string_view("--network")) != argv + argc;
  if (has_network) LateNetworks::Use();
  const int result = RunCases({{"calls of all sizes", TestCallsOfAllSizes},
                               {"other levels", TestOtherLevels},
                               {"lanes", TestLanes},
                               {"the host ends a wait", TestHostEndsAWait},
                               {"deadlines", TestDeadlines},
                               {"nobody comes", TestNobodyComes},
                               {"ranks leave a generation", TestRanksLeaveAGeneration},
                               {"two calls at once", TestTwoCallsAtOnce}},
                              argc, argv);
  CHECK((LateNetworks::num_puts() > 0) == has_network);
  return failures == 0 ? result : 1;
}
