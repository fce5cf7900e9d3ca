// Tests how the host ends calls: on an error, for a release, and at the end of the process.
#include <chrono>
#include <cstdlib>
#include <thread>

#include "tests/cpp/emulation/obstacle.h"
#include "tests/cpp/emulation/reports.h"
#include "tests/cpp/emulation/runtime/fixture.h"

namespace jax_ep::testing {
namespace {

// Whether the host has reported the end of a call, in a message that contains `part`.
bool Reported(const char* part) {
  bool found = false;
  for (const TimeoutReport& report : TakeReports()) {
    found |= report.phase == "host" && Contains(report.message, part);
  }
  return found;
}

// The host ends the wait for a device that makes no call. No kernel is waited for before.
void TestHostEndsAWait() {
  for (bool allow_low_latency : {false, true}) {
    Restart();
    DispatchProgram program(2, kSmall, allow_low_latency);
    program.Check();
    CHECK_OK(program.Launch(0));
    program.site->Abort(1, "no luck");
    program.Synchronize();
    CHECK(program.IsSafe(0));
    CHECK(program.status(0) == static_cast<int>(Outcome::kHostAbort));
    for (const Status& status : program.Run()) CHECK_FAILS(status, "no luck");
    CHECK(Reported("no luck"));
    Restart();
    program.Check();
  }
}

// A call waits for a peer that makes none: at exit, and for a release.
void TestNobodyComes() {
  const double warning_seconds = 0.01;  // measured by the emulator's clock
  Restart();
  DispatchProgram program(2, kSmall, false);
  program.Check();
  CHECK_OK(program.Launch(0));
  CHECK(Seconds([&] { Groups::OfProcess().Drain(warning_seconds, "the test ends"); }) < 20);
  program.Synchronize();
  CHECK(program.IsSafe(0));
  CHECK(Reported("rank 0 has waited 0.01 s for rank 1 in dispatch.entry"));

  // Calls that go on are waited for.
  Restart();
  program.Check();
  CHECK_OK(program.Launch(0));
  std::jthread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    CHECK_OK(program.Launch(1));
  });
  Groups::OfProcess().Release();
  CHECK(program.IsRight(0) && program.IsRight(1));
}

// A release's generation waits for a call, which waits for a device where that generation cannot be
// started. The host ends the call.
void TestHostAbortsDuringARelease() {
  setenv("JAX_EP_ENTRY_TIMEOUT_S", "40", 1);
  Restart();
  DispatchProgram program(2, kSmall, false);
  program.Check();
  CHECK_OK(program.Launch(0));
  std::this_thread::sleep_for(std::chrono::milliseconds(50));  // it runs
  emulation::faults.unlaunchable_device = 1;
  GroupOf({0, 1})->Release();
  CHECK(Seconds([] { cudaStreamSynchronize(StreamOf(0)); }) < 10);
  CHECK(program.IsSafe(0));
  unsetenv("JAX_EP_ENTRY_TIMEOUT_S");
  Restart();
  program.Check();
}

// The host ends the calls while the workspaces grow, after the run was decided on. The growth does
// not make it forgotten, and calls of the new generation wait for nobody.
void TestHostAbortsDuringAGrowth() {
  Restart();
  DispatchProgram small(2, kSmall, false);
  DispatchProgram large(2, kLarge, false);
  small.Check();
  emulation::faults.on_malloc = [&] {
    emulation::faults.on_malloc = nullptr;
    small.site->Abort(0, "no luck");
  };
  const int64_t run = NextRun();
  large.OnAll([&](int r) { return large.Enter(run, r); });
  CHECK_OK(large.Launch(0));  // and not on device 1
  CHECK(Seconds([&] { large.Synchronize(); }) < 20);
  CHECK(large.IsSafe(0) && large.status(0) == static_cast<int>(Outcome::kHostAbort));
  for (const Status& status : small.Run()) CHECK_FAILS(status, "no luck");
  CHECK(Reported("no luck"));
  Restart();
  small.Check();
  large.Check();
}

// A rank waits long in a call that succeeds, and right after it one waits for ever. The host ends
// the second wait, also if it has not read the warning of the first.
void TestALaterWaitIsFound() {
  setenv("JAX_EP_WARN_AFTER_S", "0.005", 1);
  setenv("JAX_EP_ENTRY_TIMEOUT_S", "40", 1);
  DispatchProgram program(2, kSmall, false);
  for (int round = 0; round < 8; ++round) {
    Restart();
    program.Check();
    const int first = round % 2, second = round / 2 % 2;
    CHECK_OK(program.Launch(first));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK_OK(program.Launch(1 - first));
    program.Synchronize();
    CHECK_OK(program.Launch(second));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(Seconds([] { Groups::OfProcess().Drain(0, "the test ends"); }) < 5);
    CHECK(program.IsSafe(second));
  }
  unsetenv("JAX_EP_WARN_AFTER_S");
  unsetenv("JAX_EP_ENTRY_TIMEOUT_S");
}

// A call waits in a generation that has a successor, which neither rank can begin.
void TestAWaitInAnEarlierGenerationIsFound() {
  setenv("JAX_EP_ENTRY_TIMEOUT_S", "40", 1);
  Restart();
  DispatchProgram small(2, kSmall, false), large(2, kLarge, false);
  small.Check();
  CHECK_OK(small.Launch(0));
  Obstacle obstacle(StreamOf(1));
  const int64_t run = NextRun();
  for (const Status& status : large.OnAll([&](int r) { return large.Enter(run, r); })) {
    CHECK_OK(status);
  }
  std::jthread drains([] { Groups::OfProcess().Drain(0.01, "the test ends"); });
  CHECK(Seconds([] { cudaStreamSynchronize(StreamOf(0)); }) < 20);
  CHECK(small.IsSafe(0) && small.status(0) == static_cast<int>(Outcome::kHostAbort));
  obstacle.Remove();
  unsetenv("JAX_EP_ENTRY_TIMEOUT_S");
}

// A device has failed: its peer, which waits for it, is ended.
void TestReleaseWithAFailedDevice() {
  Restart();
  DispatchProgram program(2, kSmall, false, 6);
  program.Check();
  emulation::faults.failed_device = 7;
  CHECK_OK(program.Launch(0));
  CHECK_OK(program.Launch(1));  // and does not run
  CHECK(Seconds([] { Groups::OfProcess().Release(); }) < 20);
  program.Synchronize();
  CHECK(program.IsSafe(0));
  for (const Status& status : program.Run()) CHECK_FAILS(status, "GPU 7");
  // The other devices go on.
  DispatchProgram other(2, kSmall, false);
  other.Check();
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) {
  using namespace jax_ep::testing;
  RegisterKernels();
  Obstacle::Register();
  return RunCases(
      {{"the host ends a wait", TestHostEndsAWait},
       {"nobody comes", TestNobodyComes},
       {"the host aborts during a release", TestHostAbortsDuringARelease},
       {"the host aborts during a growth", TestHostAbortsDuringAGrowth},
       {"a later wait is found", TestALaterWaitIsFound},
       {"a wait in an earlier generation is found", TestAWaitInAnEarlierGenerationIsFound},
       // A failed device stays so: this is the last one.
       {"release with a failed device", TestReleaseWithAFailedDevice}},
      argc, argv);
}
