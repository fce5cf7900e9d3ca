// Tests low-latency calls that claim a control block while a generation starts on it, after the
// generation before was aborted: they belong to the new generation.
#include <cstdlib>
#include <memory>
#include <thread>

#include "ffi/runtime/groups/groups.h"
#include "tests/cpp/emulation/programs/random_operations.h"
#include "tests/cpp/emulation/transfer/register_kernels.h"

namespace jax_ep::testing {
namespace {

constexpr int kRanks = 2;
constexpr GroupKernels kKernels = {&LoadTransferKernels, &LaunchStartGeneration};

// One block: either all warps of the call meet the host's claim, or none does.
Shape SmallShape() {
  Shape shape;
  shape.routing = {.tokens = 6, .top_k = 2, .experts = 4, .ranks = kRanks, .rows = 24, .align = 1};
  shape.hidden = 64;
  shape.num_sms = 1;
  return shape;
}

Group* TheGroup() { return Groups::OfProcess().Find({0, 1}, 0, kKernels); }

void Enter(RandomCall* call) {
  const int64_t run = NextRun();
  std::vector<std::jthread> threads;
  for (int r = 0; r < kRanks; ++r) {
    threads.emplace_back([=] {
      cudaSetDevice(r);
      CHECK_OK(call->site.Enter(run, {r, StreamOf(r), r, call->workspace_bytes(), {}}));
    });
  }
}

void Launch(RandomCall* call, int r, cudaStream_t stream) {
  cudaSetDevice(r);
  CHECK_OK(call->Launch(r, call->site.control(r), stream));
}

void CheckVerdict(const RandomCall& call, int r, Verdict want) {
  std::string why;
  CHECK(call.Check(r, &why) == want);
  if (!why.empty()) std::printf("rank %d: %s\n", r, why.c_str());
}

// Where the kernel that starts a generation stands when the call begins.
enum Window {
  kClaimed,  // the host has the claim, and nothing else has changed
  kChanged,  // the new state is there, and the work counters are reset
};

// Holds the window open on rank 0 until the call has done there what it does before its claim.
class CallInWindow {
 public:
  CallInWindow(Window window, RandomCall* call, cudaStream_t stream)
      : call_(*call), stream_(stream), claim_(call->site.control(0)->claim) {
    emulation::hooks.after_swap = [=, this](const uint64_t* address) {
      if (address != &claim_) return;  // rank 1's
      starter_ = std::this_thread::get_id();
      if (window == kClaimed) Begin();
    };
    emulation::hooks.before_long_sleep = [=, this] {
      // The thread that ends the claim.
      const bool is_it = std::this_thread::get_id() == starter_ && threadIdx.x == 0;
      if (window == kChanged && is_it) Begin();
    };
  }
  ~CallInWindow() { emulation::hooks = {}; }

 private:
  uint64_t Claim() const { return std::atomic_ref(claim_).load(); }

  void Begin() {
    Launch(&call_, 0, stream_);
    while ((Claim() & kClaimTags) == 0) emulation::Yield();
    emulation::AwaitTurns();
    CHECK((Claim() & kClaimOfHost) != 0);
  }

  RandomCall& call_;
  const cudaStream_t stream_;
  uint64_t& claim_;
  std::atomic<std::thread::id> starter_;
};

void TestCallThatMeetsAStart(Operation operation, Window window) {
  Groups::OfProcess().Release();
  Random random(1);
  RandomDispatch dispatch(SmallShape(), 0, kKernels), alone(SmallShape(), 0, kKernels);
  std::unique_ptr<RandomCall> call;
  if (operation == Operation::kDispatch) {
    call = std::make_unique<RandomDispatch>(SmallShape(), 0, kKernels);
  } else if (operation == Operation::kRedispatch) {
    call = std::make_unique<RandomRedispatch>(SmallShape(), &dispatch, 0, kKernels);
  } else {
    call = std::make_unique<RandomCombine>(SmallShape(), &dispatch, 0, kKernels);
  }
  for (RandomCall* each :
       {static_cast<RandomCall*>(&dispatch), static_cast<RandomCall*>(&alone), call.get()}) {
    each->Fill(random);
    Enter(each);
  }
  for (int r = 0; r < kRanks; ++r) Launch(&dispatch, r, StreamOf(r));
  for (int r = 0; r < kRanks; ++r) cudaStreamSynchronize(StreamOf(r));

  // Rank 1 begins the next generation, so the call of rank 0 aborts the old one.
  cudaSetDevice(0);
  cudaStream_t other;
  cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
  {
    const CallInWindow holds(window, call.get(), other);
    Launch(&alone, 0, StreamOf(0));
    CHECK_OK(TheGroup()->Reserve(2 * call->workspace_bytes(), {StreamOf(0), StreamOf(1)}));
    Launch(call.get(), 1, StreamOf(1));
    for (cudaStream_t stream : {StreamOf(0), StreamOf(1), other}) cudaStreamSynchronize(stream);
  }
  cudaStreamDestroy(other);
  CHECK(alone.status(0) == static_cast<int>(Outcome::kMismatch));
  for (int r = 0; r < kRanks; ++r) {
    CheckVerdict(dispatch, r, Verdict::kRight);
    CheckVerdict(*call, r, Verdict::kRight);
  }
}

}  // namespace
}  // namespace jax_ep::testing

int main() {
  using namespace jax_ep;
  RegisterKernels();
  setenv("JAX_EP_ENTRY_TIMEOUT_S", "200", 1);
  for (const Operation operation :
       {Operation::kDispatch, Operation::kRedispatch, Operation::kCombine}) {
    for (const testing::Window window : {testing::kClaimed, testing::kChanged}) {
      testing::TestCallThatMeetsAStart(operation, window);
    }
  }
  return testing::Finish();
}
