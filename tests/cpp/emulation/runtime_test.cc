// Tests groups, generations and call sites with threads as XLA's, on the emulated CUDA runtime,
// with the kernels: nothing hangs, and nothing uses memory that is freed.
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include "ffi/runtime/groups.h"
#include "tests/cpp/emulation/dispatch_program.h"
#include "tests/cpp/emulation/register_kernels.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

using testing::DispatchProgram;
using testing::NextRun;
using testing::StreamOf;

constexpr int kSmall = 6, kMedium = 600, kLarge = 6000;  // tokens

double Seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Groups live until the process ends; a test begins with new generations and no faults.
void Restart() {
  emulation::faults = {};
  Groups::OfProcess().Release();
  ProcessMailbox().Take();
}

Group* GroupOf(std::vector<int> devices) {
  return Groups::OfProcess().Find(devices, 0, DispatchProgram::kKernels);
}

// A program of two ranks in one of two lanes, with as many SMs as it can get.
DispatchProgram InLane(int64_t lane, int num_tokens, int64_t num_lanes = 2) {
  return {2, num_tokens, false, 0, {lane, num_lanes, 0}};
}

bool Reported(const char* part) {
  Groups::OfProcess().PostReports(ProcessMailbox());
  bool found = false;
  for (const TimeoutReport& report : ProcessMailbox().Take()) {
    found |= report.phase == "host" && testing::Contains(report.message, part);
  }
  return found;
}

// A thread at a point that it passes only when it is told to.
class Checkpoint {
 public:
  void Pass() {
    std::unique_lock lock(mutex_);
    reached_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }
  void AwaitReached() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }
  void Open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false, open_ = false;
};

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

// A kernel of the tests, which runs until it is told to end.
struct WaitStage {
  const std::atomic<bool>* is_over;
};
void WaitKernel(WaitStage stage) {
  while (!*stage.is_over) emulation::Yield();
}

// Occupies a stream until it is told to end.
class Obstacle {
 public:
  explicit Obstacle(cudaStream_t stream) {
    WaitStage stage = {&is_over_};
    void* arguments[] = {&stage};
    const auto kernel = reinterpret_cast<const void*>(WaitKernel);
    CHECK(cudaLaunchKernel(kernel, 1, 32, arguments, 0, stream) == cudaSuccess);
  }
  void Remove() { is_over_ = true; }
  std::jthread RemoveLater() {
    return std::jthread([this] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      Remove();
    });
  }
  bool IsRemoved() const { return is_over_; }

 private:
  std::atomic<bool> is_over_ = false;
};

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

// Nor does the growth for a program of another stream.
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

// While one thread is in the driver, others learn at once what they ask for.
void TestNoLockIsHeldOverTheDriver() {
  Restart();
  DispatchProgram small(2, kSmall, false);
  DispatchProgram other(2, kSmall, false);
  DispatchProgram large(2, kLarge, false);
  small.Check();
  other.Check();
  Checkpoint checkpoint;
  emulation::faults.on_malloc = [&] {
    emulation::faults.on_malloc = nullptr;
    checkpoint.Pass();
  };
  std::jthread grows([&] { large.Check(); });
  checkpoint.AwaitReached();
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
  checkpoint.Open();
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
      std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
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
}  // namespace jax_ep

int main() {
  using namespace jax_ep;
  RegisterKernels();
  emulation::Register(reinterpret_cast<const void*>(WaitKernel), WaitKernel);
  const struct {
    const char* name;
    void (*run)();
  } tests[] = {{"calls of all sizes", TestCallsOfAllSizes},
               {"the host ends a wait", TestHostEndsAWait},
               {"nobody comes", TestNobodyComes},
               {"host copies end before the generation", TestHostCopiesEndBeforeTheGeneration},
               {"a release overtakes no growth", TestAReleaseOvertakesNoGrowth},
               {"a growth overtakes no other", TestAGrowthOvertakesNoOther},
               {"the host aborts during a release", TestHostAbortsDuringARelease},
               {"a later wait is found", TestALaterWaitIsFound},
               {"a wait in an earlier generation is found", TestAWaitInAnEarlierGenerationIsFound},
               {"growth before a launch", TestGrowthBeforeALaunch},
               {"old workspaces are freed", TestOldWorkspacesAreFreed},
               {"too many generations", TestTooManyGenerations},
               {"no lock is held over the driver", TestNoLockIsHeldOverTheDriver},
               {"one device fails", TestOneDeviceFails},
               {"a launch fails", TestALaunchFails},
               {"a generation starts on some devices", TestAGenerationStartsOnSomeDevices},
               {"out of memory", TestOutOfMemory},
               {"two calls at once", TestTwoCallsAtOnce},
               {"growth beside two calls", TestGrowthBesideTwoCalls},
               {"ranks in two generations", TestRanksInTwoGenerations},
               {"the host aborts during a growth", TestHostAbortsDuringAGrowth},
               {"lanes run at once", TestLanesRunAtOnce},
               {"shares of the SMs", TestSharesOfTheSms},
               {"lanes need their share of the SMs", TestLanesNeedTheirShareOfTheSms},
               {"a lane grows", TestALaneGrows},
               {"release of two lanes", TestReleaseOfTwoLanes},
               {"one lane fails", TestOneLaneFails},
               // A failed device stays so: this is the last one.
               {"release with a failed device", TestReleaseWithAFailedDevice}};
  for (const auto& test : tests) {
    std::printf("%s: ", test.name);
    std::fflush(stdout);
    std::printf("%.1f s\n", Seconds(test.run));
  }
  return testing::Finish();
}
