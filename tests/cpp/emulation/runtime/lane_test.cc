// Tests lanes: calls of two of them at the same time, their SMs, growth, release and failures.
#include <chrono>
#include <cstdlib>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/emulation/runtime/fixture.h"

namespace jax_ep::testing {
namespace {

// A program of two ranks in one of two lanes, with as many SMs as it can get.
DispatchProgram InLane(int64_t lane, int num_tokens, int64_t num_lanes = 2) {
  return {2, num_tokens, false, 0, {lane, num_lanes, 0}};
}

// Two lanes run at once, launched in opposite orders on the two GPUs.
void TestLanesRunAtOnce() {
  Restart();
  DispatchProgram first = InLane(0, kMedium), second = InLane(1, kMedium);
  for (int round = 0; round < 12; ++round) {
    first.Clear();
    second.Clear();
    const int64_t runs[] = {NextRun(), NextRun()};
    const std::vector<Status> statuses = first.OnAll([&](int r) {
      Status status = first.Enter(runs[0], r);
      if (status.ok()) status = second.Enter(runs[1], r);
      if (status.ok()) status = (r == 0 ? first : second).Launch(r);
      std::this_thread::sleep_for(std::chrono::microseconds(100 * round));
      return status.ok() ? (r == 0 ? second : first).Launch(r) : status;
    });
    for (const Status& status : statuses) CHECK_OK(status);
    first.Synchronize();
    second.Synchronize();
    for (int r = 0; r < 2; ++r) CHECK(first.IsRight(r) && second.IsRight(r));
  }
}

// The blocks of a kernel are at most its lane's share of the SMs.
void TestSharesOfTheSms() {
  const struct {
    int64_t num_lanes;
    int64_t num_sms;
    unsigned dispatch_blocks, combine_blocks;
  } cases[] = {{1, 0, 4, 8}, {2, 0, 2, 2}, {3, 0, 1, 1}, {8, 0, 1, 1}, {1, 1, 1, 2}, {2, 1, 1, 2}};
  for (const auto& expected : cases) {
    TransferCall call = {.shape = {.num_tokens = kMedium,
                                   .hidden = 8,
                                   .top_k = 1,
                                   .num_experts = 2,
                                   .num_ranks = 2,
                                   .num_rows = 2 * kMedium,
                                   .format = kFloat32Rows},
                         .num_sms = expected.num_sms,
                         .num_lanes = expected.num_lanes,
                         .allow_low_latency = false};
    PreparedDispatch dispatch;
    PreparedCombine combine;
    CHECK_OK(PrepareDispatch(call, &dispatch));
    CHECK_OK(PrepareCombine(call, &combine));
    CHECK(dispatch.launches[0].blocks == expected.dispatch_blocks);
    CHECK(combine.launches[0].blocks == expected.combine_blocks);
    call.num_lanes = 0;
    CHECK_FAILS(PrepareDispatch(call, &dispatch), "num_lanes is 0");
  }
}

// One GPU fills with a lane, and the other GPU with the other lane. If each lane's kernels take
// their share of the SMs only, both run; otherwise they wait for each other until the deadline.
void TestLanesNeedTheirShareOfTheSms() {
  const unsigned resident_blocks = std::exchange(emulation::settings.resident_blocks, 16);
  for (const int64_t num_lanes : {2, 1}) {
    setenv("JAX_EP_ENTRY_TIMEOUT_S", num_lanes == 1 ? "1" : "600", 1);
    Restart();
    DispatchProgram first = InLane(0, kMedium, num_lanes), second = InLane(1, kMedium, num_lanes);
    first.Check();
    second.Check();
    int num_right = 0, num_timeouts = 0;
    for (int round = 0; round < 5; ++round) {
      CHECK_OK(first.Launch(0));
      CHECK_OK(second.Launch(1));
      const unsigned share = emulation::settings.num_sms / static_cast<unsigned>(num_lanes);
      for (int device : {0, 1}) {
        while (emulation::ResidentBlocks(device) < share) std::this_thread::yield();
      }
      CHECK_OK(second.Launch(0));
      CHECK_OK(first.Launch(1));
      for (DispatchProgram* program : {&first, &second}) {
        program->Synchronize();
        for (int r = 0; r < 2; ++r) {
          CHECK(program->IsRight(r) || program->IsSafe(r));
          num_right += program->IsRight(r);
          num_timeouts += program->status(r) == static_cast<int>(Outcome::kTimeout);
        }
      }
      if (num_lanes == 1) break;  // it has failed
    }
    CHECK(num_lanes == 2 ? num_right == 20 : num_timeouts > 0);
  }
  unsetenv("JAX_EP_ENTRY_TIMEOUT_S");
  emulation::settings.resident_blocks = resident_blocks;
}

// The workspaces of a lane grow while a call of the other lane runs, and waits for a peer.
void TestALaneGrows() {
  Restart();
  DispatchProgram runs = InLane(0, kSmall);
  runs.Check();
  for (int num_tokens : {kSmall, kMedium, kLarge}) {
    runs.Clear();
    CHECK_OK(runs.Launch(0));
    DispatchProgram grows = InLane(1, num_tokens);
    grows.Check();
    grows.Check();  // frees
    CHECK_OK(runs.Launch(1));
    runs.Synchronize();
    CHECK(runs.IsRight(0) && runs.IsRight(1));
  }
}

// A release waits for the calls of both lanes and frees both; if nobody comes, it ends both.
void TestReleaseOfTwoLanes() {
  Restart();
  DispatchProgram first = InLane(0, kSmall), second = InLane(1, kMedium);
  const auto launch = [&](int r) {
    CHECK_OK(first.Launch(r));
    CHECK_OK(second.Launch(r));
  };
  first.Check();
  second.Check();
  launch(0);
  {
    std::jthread later([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      launch(1);
    });
    CHECK(Groups::OfProcess().Release() ==
          2 * (first.workspace_bytes() + second.workspace_bytes()));
  }
  for (int r = 0; r < 2; ++r) CHECK(first.IsRight(r) && second.IsRight(r));
  first.Check();
  second.Check();
  launch(0);
  Groups::OfProcess().Drain(0.01, "the test ends");
  for (DispatchProgram* program : {&first, &second}) {
    program->Synchronize();
    CHECK(program->IsSafe(0));
    for (const Status& status : program->Run()) CHECK_FAILS(status, "the test ends");
  }
  Restart();
  first.Check();
  second.Check();
}

// A call of one lane waits in vain: the other lane goes on. A kernel that cannot be launched in one
// lane ends the calls of both, because its device may make no other call either.
void TestOneLaneFails() {
  setenv("JAX_EP_ENTRY_TIMEOUT_S", "1", 1);
  Restart();
  DispatchProgram first = InLane(0, kSmall), second = InLane(1, kSmall);
  first.Check();
  second.Check();
  CHECK_OK(second.Launch(0));
  second.Synchronize();
  CHECK(second.IsSafe(0) && second.status(0) == static_cast<int>(Outcome::kTimeout));
  first.Check();
  for (const Status& status : second.Run()) CHECK_FAILS(status, "rank 0 waited for rank 1");
  first.Check();
  unsetenv("JAX_EP_ENTRY_TIMEOUT_S");
  Restart();
  first.Check();
  second.Check();
  CHECK_OK(first.Launch(0));
  emulation::faults.unlaunchable_device = 1;
  const Status status = second.Launch(1);
  CHECK(!status.ok());
  second.site->Abort(1, status.message);
  CHECK(Seconds([&] { first.Synchronize(); }) < 10);
  CHECK(first.IsSafe(0) && first.status(0) == static_cast<int>(Outcome::kHostAbort));
  Restart();
  first.Check();
  second.Check();
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) {
  using namespace jax_ep::testing;
  RegisterKernels();

  return RunCases({{"lanes run at once", TestLanesRunAtOnce},
                   {"shares of the SMs", TestSharesOfTheSms},
                   {"lanes need their share of the SMs", TestLanesNeedTheirShareOfTheSms},
                   {"a lane grows", TestALaneGrows},
                   {"release of two lanes", TestReleaseOfTwoLanes},
                   {"one lane fails", TestOneLaneFails}},
                  argc, argv);
}
