// Tests call sites: runs of all devices, and errors of one of them.
#include <latch>
#include <thread>
#include <vector>

#include "tests/cpp/emulation/runtime/fixture.h"

namespace jax_ep::testing {
namespace {

void TestCallsOfAllSizes() {
  for (int num_ranks : {1, 2, 3}) {
    for (bool allow_low_latency : {false, true}) {
      DispatchProgram small(num_ranks, kSmall, allow_low_latency);
      DispatchProgram large(num_ranks, kMedium, allow_low_latency);
      for (int i = 0; i < 3; ++i) {
        small.Check();
        large.Check();
      }
      CHECK(Groups::OfProcess().Release() > 0);
      small.Check();
    }
  }
}

// While one thread is in the driver, others learn at once what they ask for.
void TestNoLockIsHeldOverTheDriver() {
  Restart();
  DispatchProgram small(2, kSmall, false);
  DispatchProgram other(2, kSmall, false);
  DispatchProgram large(2, kLarge, false);
  small.Check();
  other.Check();
  std::latch reached(1), open(1);
  emulation::faults.on_malloc = [&] {
    emulation::faults.on_malloc = nullptr;
    reached.count_down();
    open.wait();
  };
  std::jthread grows([&] { large.Check(); });
  reached.wait();
  const double seconds = Seconds([&] {
    CHECK(small.site->HasRank(0));
    CHECK(small.site->control(1) != nullptr);
    CHECK_OK(GroupOf({0, 1})->Failure());
    CHECK(GroupOf({0, 1})->HasRoom(small.workspace_bytes()));
    Groups::OfProcess().PostReports(ProcessMailbox());
    small.Check();  // whole runs
    other.Check();
  });
  CHECK(seconds < 20);
  open.count_down();
}

// An error of one device before it enters is everyone's, at once.
void TestOneDeviceFails() {
  Restart();
  DispatchProgram program(3, kSmall, false, 3);
  const int64_t run = NextRun();
  const double seconds = Seconds([&] {
    const std::vector<Status> statuses = program.OnAll([&](int r) {
      return program.Enter(run, r, r == 1 ? InvalidArgument("no communicator") : Status{});
    });
    for (const Status& status : statuses) CHECK_FAILS(status, "no communicator");
  });
  CHECK(seconds < 10);
  program.Check();
}

// A kernel cannot be launched on one device. Its peers do not wait for it.
void TestALaunchFails() {
  Restart();
  DispatchProgram program(2, kSmall, false);
  program.Check();
  emulation::faults.unlaunchable_device = 1;
  const std::vector<Status> statuses = program.OnAll([&](int r) {
    const Status status = program.Launch(r);
    if (!status.ok()) program.site->Abort(r, status.message);
    return status;
  });
  CHECK_OK(statuses[0]);
  CHECK(!statuses[1].ok());
  CHECK(Seconds([&] { program.Synchronize(); }) < 10);
  CHECK(program.IsSafe(0));
  Restart();
  program.Check();
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) {
  using namespace jax_ep::testing;
  RegisterKernels();

  return RunCases({{"calls of all sizes", TestCallsOfAllSizes},
                   {"no lock is held over the driver", TestNoLockIsHeldOverTheDriver},
                   {"one device fails", TestOneDeviceFails},
                   {"a launch fails", TestALaunchFails}},
                  argc, argv);
}
