// Random calls that all processes of a test make.
#ifndef JAX_EP_TESTS_CPP_EMULATION_PROCESSES_RANDOM_CALLS_H_
#define JAX_EP_TESTS_CPP_EMULATION_PROCESSES_RANDOM_CALLS_H_

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/emulation/processes/process.h"
#include "tests/cpp/emulation/programs/random_operations.h"

namespace jax_ep::testing {

// Returns the sizes that NVLink domains may have; 0: one domain has all ranks.
inline std::vector<int> DomainSizes(const Layout& layout) {
  if (!layout.has_hosts) return harness::DomainSizes(layout.num_ranks());
  std::vector<int> sizes;
  for (int size = 1; size <= layout.ranks_per_process; ++size) {
    if (layout.ranks_per_process % size == 0) sizes.push_back(size);
  }
  return sizes;
}

inline int RandomDomainSize(Random& random, const Layout& layout) {
  if (!layout.has_hosts) return harness::RandomDomainSize(random, layout.num_ranks());
  const std::vector<int> sizes = DomainSizes(layout);
  return sizes[random() % sizes.size()];
}

// Calls that all processes make in the same random order, of random shapes. Workspaces grow.
class RandomCalls {
 public:
  static constexpr int kNumLanes = 2;

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
    Synchronize();
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

  void Synchronize() const {
    for (int i = 0; i < local_.count; ++i) cudaStreamSynchronize(StreamOf(i, lane_));
  }

  void MakeProgram() {
    const harness::Options options = {.domain_size = RandomDomainSize(random_, layout_),
                                      .rail_slots = DispatchProgram::rail_slots,
                                      .tiny = true};
    Synchronize();  // calls that come before one with an error may still run
    calls_.clear();
    lane_ = Uniform(random_, 0, kNumLanes - 1);
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

#endif  // JAX_EP_TESTS_CPP_EMULATION_PROCESSES_RANDOM_CALLS_H_
