// One of several processes of a test: its devices, and random calls that all of them make.
#ifndef JAX_EP_TESTS_CPP_EMULATION_PROCESS_H_
#define JAX_EP_TESTS_CPP_EMULATION_PROCESS_H_

#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ffi/runtime/processes/cuda_transport.h"
#include "tests/cpp/emulation/dispatch_program.h"
#include "tests/cpp/emulation/random_call.h"
#include "tests/cpp/emulation/shared_transport.h"
#include "tests/cpp/emulation/streams.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep::testing {

struct Layout {
  int num_processes;
  int ranks_per_process;
  int num_ranks() const { return num_processes * ranks_per_process; }
};

// A process's side of a test.
class Process {
 public:
  Process(Layout layout, int index, SharedExchange* exchange, uint64_t seed)
      : transport{exchange, {&memory, CudaIpcMemory()}}, layout_(layout), index_(index) {
    emulation::settings.seed = seed * 31 + static_cast<uint64_t>(index);
    // Kernels share few CPUs with many others: only a test of deadlines has short ones.
    for (const char* name :
         {"JAX_EP_ENTRY_TIMEOUT_S", "JAX_EP_PROGRESS_TIMEOUT_S", "JAX_EP_WARN_AFTER_S"}) {
      setenv(name, "1000000", 1);
    }
  }

  LocalRanks local() const {
    return {index_ * layout_.ranks_per_process, layout_.ranks_per_process, &transport,
            SharedExchange::Communicator(0)};
  }

  DispatchProgram Dispatch(int num_tokens, bool allow_low_latency, int64_t lane = 0) {
    return {layout_.num_ranks(), num_tokens, allow_low_latency, 0, {lane, 2, 2}, local()};
  }

  SharedMemory memory;
  Transport transport;

 private:
  const Layout layout_;
  const int index_;
};

// Calls that all processes make in the same random order, of random shapes. Workspaces grow.
class RandomCalls {
 public:
  RandomCalls(Process* process, Layout layout, uint64_t seed)
      : layout_(layout), local_(process->local()), random_(seed) {}

  // Makes a dispatch and calls with its plan, then looks at their results. Returns the first error.
  Status Next() {
    if (num_rounds_++ % kRoundsOfAProgram == 0) MakeProgram();
    for (const auto& call : calls_) call->Fill(random_);
    for (const auto& call : calls_) {
      if (Status status = Run(*call); !status.ok()) return status;
    }
    num_calls += calls_.size();
    for (int i = 0; i < local_.count; ++i) cudaStreamSynchronize(StreamOf(i, lane_));
    Status status;
    for (const auto& call : calls_) {
      for (int i = 0; i < local_.count; ++i) {
        std::string why;
        const Verdict verdict = call->Check(local_.first + i, &why);
        if (verdict == Verdict::kWrong) Report(__FILE__, __LINE__, "a result", why);
        if (verdict == Verdict::kEnded) status = FailedPrecondition("a call has been ended");
      }
    }
    return status;
  }

  bool IsTimeToRelease() { return Uniform(random_, 0, 31) == 0; }

  uint64_t num_calls = 0;

 private:
  static constexpr int kRoundsOfAProgram = 4;
  static constexpr GroupKernels kKernels = {&LoadTransferKernels, &LaunchStartGeneration};

  void MakeProgram() {
    const harness::Options options = {.tiny = true};
    calls_.clear();
    lane_ = Uniform(random_, 0, 1);
    auto dispatch = std::make_unique<RandomDispatch>(
        harness::RandomShape(random_, layout_.num_ranks(), options), lane_, kKernels, local_);
    RandomDispatch* const of = dispatch.get();
    calls_.push_back(std::move(dispatch));
    for (int i = Uniform(random_, 1, 3); i > 0; --i) {
      const Shape shape = harness::Varied(random_, of->shape, options);
      if (Uniform(random_, 0, 1)) {
        calls_.push_back(std::make_unique<RandomRedispatch>(shape, of, lane_, kKernels, local_));
      } else {
        calls_.push_back(std::make_unique<RandomCombine>(shape, of, lane_, kKernels, local_));
      }
    }
  }

  Status Run(RandomCall& call) const {
    const int64_t run = NextRun();
    for (int i = 0; i < local_.count; ++i) {
      if (!call.site.HasRank(i)) call.site.Announce(run);
    }
    std::vector<Status> statuses(local_.count);
    std::vector<std::jthread> threads;
    for (int i = 0; i < local_.count; ++i) {
      threads.emplace_back([&, i] {
        cudaSetDevice(i);
        const cudaStream_t stream = StreamOf(i, lane_);
        const int rank = local_.first + i;
        statuses[i] = call.site.Enter(
            run, {i, stream, rank, call.workspace_bytes(), {}, local_.communicator, "a call"});
        if (statuses[i].ok()) statuses[i] = call.Launch(rank, call.site.control(i), stream);
      });
    }
    threads.clear();
    return statuses[0];
  }

  const Layout layout_;
  const LocalRanks local_;
  Random random_;
  uint64_t num_rounds_ = 0;
  int64_t lane_ = 0;
  std::vector<std::unique_ptr<RandomCall>> calls_;
};

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_PROCESS_H_
