// Tests memory that two processes share: failures to allocate or map it, and its next kind.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <thread>

#include "tests/cpp/emulation/processes/delayed_ends.h"
#include "tests/cpp/emulation/processes/process.h"

namespace jax_ep::testing {
namespace {

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
// release leaves as many descriptors and bytes as the one before.
void TestNextKindOfMemory() {
  InTwo([](Process& process, int index) {
    process.memory.fails_import = index == 1;
    process.Dispatch(6, false).Check();
    process.memory.fails_import = false;
    process.Dispatch(600, false).Check();
    Groups::OfProcess().Release();
    const int descriptors = CountDescriptors();
    const size_t bytes = emulation::AllocatedBytes();
    for (int i = 0; i < 3; ++i) {
      process.Dispatch(600, false).Check();
      process.Dispatch(1200, false).Check();
      CHECK(emulation::AllocatedBytes() > bytes);
      Groups::OfProcess().Release();
      CHECK(emulation::AllocatedBytes() == bytes);
    }
    CHECK(CountDescriptors() <= descriptors + 1);  // the other's, just sent
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

// A process dies when it has mapped the memory of the other one, whose own mapping then fails. The
// error says why, though the other process learns it later.
void TestMemoryOfDead() {
  auto* const killed = SharedBetweenForks<std::atomic<pid_t>>();
  SharedExchange exchange;
  Forks forks(2, [&](int index) {
    if (index == 1) *killed = getpid();
    auto* const ends = index == 0 ? new DelayedEnds : nullptr;
    Process process({2, 1}, index, &exchange, 1);
    process.transport.memories = {&process.memory};
    if (index == 0) {
      process.memory.before_import = [&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the other one maps
        kill(*killed, SIGKILL);
        process.memory.fails_import = true;
        ends->Tell();
      };
    }
    for (const Status& status : process.Dispatch(6, false).Run()) {
      CHECK_FAILS(status, "rank 1 in process 1");
      CHECK_FAILS(status, "has died");
    }
  });
  forks.Await(15, 1);
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) {
  using namespace jax_ep::testing;
  RegisterKernels();
  return RunCases({{"memory failures", TestMemoryFailures},
                   {"the next kind of memory", TestNextKindOfMemory},
                   {"no kind of memory", TestNoKindOfMemory},
                   {"the memory of a dead process", TestMemoryOfDead}},
                  argc, argv);
}
