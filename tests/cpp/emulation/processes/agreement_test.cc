// Tests steps on which two processes do not agree: both fail, with an error that names both sides.
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "tests/cpp/emulation/processes/process.h"

namespace jax_ep::testing {
namespace {

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
    for (int i = 0; i < 6000 && !found; ++i) {  // a minute, as the machine may be busy
      for (const TimeoutReport& report : TakeReports()) {
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

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) {
  using namespace jax_ep::testing;
  RegisterKernels();
  return RunCases({{"another call", TestOtherCall},
                   {"a message that is too long", TestCannotTell},
                   {"other sizes", TestOtherSizes},
                   {"nobody comes", TestNobodyComes},
                   {"every process reports", TestEveryProcessReports},
                   {"a release instead of a call", TestReleaseInstead}},
                  argc, argv);
}
