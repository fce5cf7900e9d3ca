// Tests claims: two calls of a rank at the same time, in two streams.
#include <chrono>
#include <cstdio>
#include <numeric>
#include <thread>
#include <vector>

#include "tests/cpp/emulation/runtime/fixture.h"

namespace jax_ep::testing {
namespace {

// Two calls of a rank at the same time: each is whole or fails, and nothing hangs. The group works
// again after a release.
void TestTwoCallsAtOnce() {
  int num_whole = 0, num_concurrent = 0;
  for (int round = 0; round < 24; ++round) {
    Restart();
    const int num_ranks = 1 + round % 3;
    std::vector<int> devices(num_ranks);
    std::iota(devices.begin(), devices.end(), 0);
    DispatchProgram first(num_ranks, kMedium, round % 2 == 0);
    DispatchProgram second(num_ranks, round % 4 < 2 ? kMedium : kSmall, round % 2 == 0);
    first.Check();
    second.Check();
    std::vector<cudaStream_t> other(num_ranks);
    for (int r = 0; r < num_ranks; ++r) {
      cudaSetDevice(r);
      cudaStreamCreateWithFlags(&other[r], cudaStreamNonBlocking);
    }
    for (int r = 0; r < num_ranks; ++r) {
      CHECK_OK(first.Launch(r));
      // Long enough for a rank that is alone to end its first call, also on a busy machine.
      const int pause = num_ranks == 1 ? 2000 * round : 300 * round;
      std::this_thread::sleep_for(std::chrono::microseconds(pause));
      CHECK_OK(second.Launch(r, other[r]));
    }
    first.Synchronize();
    for (cudaStream_t stream : other) cudaStreamDestroy(stream);
    for (int r = 0; r < num_ranks; ++r) {
      CHECK(first.IsRight(r) || first.IsSafe(r));
      CHECK(second.IsRight(r) || second.IsSafe(r));
      for (const DispatchProgram* program : {&first, &second}) {
        num_whole += program->IsRight(r);
        num_concurrent += program->status(r) == static_cast<int>(Outcome::kConcurrent);
        if (program->IsSafe(r)) CHECK(!GroupOf(devices)->Failure().ok());
      }
    }
  }
  std::printf("%d whole, %d concurrent, ", num_whole, num_concurrent);
  CHECK(num_whole > 0 && num_concurrent > 0);
  Restart();
  DispatchProgram(2, kSmall, false).Check();
}

// The workspaces grow while two calls of a rank run at once. Each call is whole or fails, a start
// kernel disturbs none, and no generation but a release's works again.
void TestGrowthBesideTwoCalls() {
  for (int round = 0; round < 12; ++round) {
    Restart();
    DispatchProgram first(2, kMedium, false), second(2, kMedium, false), large(2, kLarge, false);
    first.Check();
    second.Check();
    cudaStream_t other[2];
    for (int r = 0; r < 2; ++r) {
      cudaSetDevice(r);
      cudaStreamCreateWithFlags(&other[r], cudaStreamNonBlocking);
      CHECK_OK(second.Launch(r, other[r]));
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200 * round));
    for (int r = 0; r < 2; ++r) CHECK_OK(first.Launch(r));
    large.Run();  // or finds the failure
    first.Synchronize();
    for (cudaStream_t stream : other) cudaStreamDestroy(stream);
    for (int r = 0; r < 2; ++r) {
      CHECK(first.IsRight(r) || first.IsSafe(r));
      CHECK(second.IsRight(r) || second.IsSafe(r));
    }
  }
  Restart();
  DispatchProgram(2, kSmall, false).Check();
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) {
  using namespace jax_ep::testing;
  RegisterKernels();

  return RunCases({{"two calls at once", TestTwoCallsAtOnce},
                   {"growth beside two calls", TestGrowthBesideTwoCalls}},
                  argc, argv);
}
