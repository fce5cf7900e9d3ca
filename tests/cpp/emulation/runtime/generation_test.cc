// Tests generations: how workspaces grow, when they are freed, and what calls find meanwhile.
#include <chrono>
#include <thread>
#include <vector>

#include "tests/cpp/emulation/obstacle.h"
#include "tests/cpp/emulation/runtime/fixture.h"

namespace jax_ep::testing {
namespace {

// A generation is freed while the host's abort words are still in flight.
void TestHostCopiesEndBeforeTheGeneration() {
  Restart();
  const std::vector<Member> members = {{.device = 0, .control = nullptr, .copies = StreamOf(0)}};
  std::unique_ptr<Generation> generation;
  bool out_of_memory = false;
  CHECK_OK(Generation::Allocate(members, 1, 4096, &generation, &out_of_memory));
  Obstacle obstacle(StreamOf(0));
  generation->Abort("too late");
  const std::jthread later = obstacle.RemoveLater();
  generation.reset();
  CHECK(obstacle.IsRemoved());
  cudaStreamSynchronize(StreamOf(0));
}

// A generation has to wait in XLA's stream before it starts. A release that comes meanwhile neither
// overtakes it nor frees it.
void TestAReleaseOvertakesNoGrowth() {
  Restart();
  DispatchProgram small(1, kSmall, false), large(1, kLarge, false);
  small.Check();
  Obstacle obstacle(StreamOf(0));
  CHECK_OK(large.Enter(NextRun(), 0));
  {
    const std::jthread later = obstacle.RemoveLater();
    GroupOf({0})->Release();
    CHECK(obstacle.IsRemoved());
  }
  cudaStreamSynchronize(StreamOf(0));
  small.Check();
  large.Check();
}

// A growth for a program of another stream does not overtake a generation that has to wait.
void TestAGrowthOvertakesNoOther() {
  Restart();
  DispatchProgram small(1, kSmall, false), medium(1, kMedium, false), large(1, kLarge, false);
  small.Check();
  Obstacle obstacle(StreamOf(0));
  CHECK_OK(medium.Enter(NextRun(), 0));
  cudaStream_t other;
  cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
  CHECK_OK(large.site->Enter(NextRun(), {0, other, 0, large.workspace_bytes(), {}}));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  obstacle.Remove();
  cudaStreamSynchronize(StreamOf(0));
  cudaStreamDestroy(other);
  large.Check();
  medium.Check();
}

// A second thread is between Enter and its launch, while the workspace grows under it.
void TestGrowthBeforeALaunch() {
  Restart();
  DispatchProgram small(1, kSmall, false);
  DispatchProgram large(1, kLarge, false);
  small.Check();
  for (int i = 0; i < 3; ++i) {
    CHECK_OK(small.Enter(NextRun(), 0));
    // In the middle of the growth: before the new workspace is allocated.
    emulation::faults.on_malloc = [&] {
      emulation::faults.on_malloc = nullptr;
      CHECK_OK(small.Launch(0));
      small.Synchronize();
      CHECK(small.IsRight(0));
      CHECK_OK(small.Launch(0));
    };
    large.Check();
    small.Synchronize();
    CHECK(small.IsRight(0));
    // After it.
    CHECK_OK(small.Launch(0));
    small.Synchronize();
    CHECK(small.IsRight(0));
    Groups::OfProcess().Release();
    // A release in that place is an error, and no access to freed memory.
    CHECK_OK(small.Launch(0));
    small.Synchronize();
    CHECK(small.IsSafe(0) && small.status(0) == static_cast<int>(Outcome::kNoWorkspace));
    Restart();
    small.Check();
  }
}

void TestOldWorkspacesAreFreed() {
  Restart();
  const size_t before = emulation::AllocatedBytes();
  DispatchProgram small(2, kSmall, false);
  DispatchProgram large(2, kLarge, false);
  small.Check();
  const size_t one = emulation::AllocatedBytes() - before;
  large.Check();
  large.Check();  // frees
  const size_t both = emulation::AllocatedBytes() - before;
  CHECK(both < 2 * large.workspace_bytes() + one);
  CHECK(Groups::OfProcess().Release() == 2 * large.workspace_bytes());
  CHECK(emulation::AllocatedBytes() < before + one);
}

// Sequence numbers have room for so many generations.
void TestTooManyGenerations() {
  std::unique_ptr<Generation> generation;
  bool out_of_memory = false;
  CHECK_OK(Generation::Allocate({}, kMaxGeneration, 0, &generation, &out_of_memory));
  CHECK_FAILS(Generation::Allocate({}, kMaxGeneration + 1, 0, &generation, &out_of_memory),
              "65535 generations");
}

// A generation cannot be started on one device, whose control block stays in the one before. That
// one is freed only when all devices have begun a later one.
void TestAGenerationStartsOnSomeDevices() {
  Restart();
  DispatchProgram small(2, kSmall, false);
  DispatchProgram large(2, kLarge, false);
  for (int round = 0; round < 2; ++round) {
    small.Check();
    emulation::faults.unlaunchable_device = 1;
    for (const Status& status : large.Run()) CHECK_FAILS(status, "GPU 1");
    for (const Status& status : small.Run()) CHECK_FAILS(status, "GPU 1");
    Groups::OfProcess().Release();  // cannot be started there either
    emulation::faults.unlaunchable_device = -1;
    const size_t before = emulation::AllocatedBytes();
    Groups::OfProcess().Release();
    CHECK(emulation::AllocatedBytes() + 2 * large.workspace_bytes() < before);
    small.Check();
  }
}

// There is no memory for the old workspaces beside the new ones, or not even for the new ones.
void TestOutOfMemory() {
  Restart();
  DispatchProgram small(2, kSmall, false);
  DispatchProgram large(2, kLarge, false);
  small.Check();
  // As if the freed workspace made room.
  int calls = 0;
  emulation::faults.full_device = 1;
  emulation::faults.free_bytes = 0;
  emulation::faults.on_malloc = [&] {
    if (++calls == 3) emulation::faults.free_bytes = size_t{1} << 20;  // for a generation without
    if (calls == 5) emulation::faults.free_bytes = size_t{1} << 40;
  };
  large.Check();
  CHECK(calls > 4);
  Restart();
  small.Check();
  emulation::faults.full_device = 1;
  emulation::faults.free_bytes = size_t{1} << 20;
  const std::string takes = Concatenate("of a rank takes ", large.workspace_bytes(), " bytes");
  for (const Status& status : large.Run()) {
    CHECK_FAILS(status, "out of memory on GPU 1");
    CHECK_FAILS(status, takes);
  }
  emulation::faults = {};
  small.Check();
  large.Check();
}

// One rank has begun the next generation while another calls in the old one. That call fails, and
// so do later ones that the ranks make in different orders.
void TestRanksInTwoGenerations() {
  Restart();
  DispatchProgram small(2, kSmall, false);
  DispatchProgram large(2, kMedium, false);
  small.Check();
  // Another thread's program is launched on device 1 only after the growth.
  CHECK_OK(small.Launch(0));
  const double seconds = Seconds([&] {
    for (const Status& status : large.Run()) CHECK_OK(status);
    small.Synchronize();
    CHECK(small.IsSafe(0) && small.status(0) == static_cast<int>(Outcome::kMismatch));
    CHECK(large.IsRight(0) && large.IsRight(1));
    CHECK_OK(small.Launch(1));
    CHECK_OK(large.Launch(0));
    small.Synchronize();
  });
  CHECK(seconds < 20);
  CHECK(small.IsSafe(1) && small.status(1) == static_cast<int>(Outcome::kMismatch));
  // The failure of the first call is still known, though its generation has ended.
  for (const Status& status : large.Run()) CHECK_FAILS(status, "while rank 1 runs another call");
  Restart();
  small.Check();
  large.Check();
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) {
  using namespace jax_ep::testing;
  RegisterKernels();
  Obstacle::Register();
  return RunCases({{"host copies end before the generation", TestHostCopiesEndBeforeTheGeneration},
                   {"a release overtakes no growth", TestAReleaseOvertakesNoGrowth},
                   {"a growth overtakes no other", TestAGrowthOvertakesNoOther},
                   {"growth before a launch", TestGrowthBeforeALaunch},
                   {"old workspaces are freed", TestOldWorkspacesAreFreed},
                   {"too many generations", TestTooManyGenerations},
                   {"a generation starts on some devices", TestAGenerationStartsOnSomeDevices},
                   {"out of memory", TestOutOfMemory},
                   {"ranks in two generations", TestRanksInTwoGenerations}},
                  argc, argv);
}
