// Random programs of one lane of a rank group: their calls, and what has become of them.
#ifndef JAX_EP_TESTS_CPP_EMULATION_RUNTIME_RANDOM_PROGRAM_H_
#define JAX_EP_TESTS_CPP_EMULATION_RUNTIME_RANDOM_PROGRAM_H_

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "tests/cpp/emulation/programs/random_operations.h"

namespace jax_ep::testing {

struct Counts {
  int64_t rounds = 0, calls = 0, right = 0, ended = 0, aborts = 0, releases = 0;
  static inline std::atomic<int64_t> growths = 0;
};

inline Status StartAndCount(ControlBlock* control, const GenerationState* next,
                            cudaStream_t stream) {
  if (next->rank == 0 && next->workspace_bytes > 0) ++Counts::growths;
  return LaunchStartGeneration(control, next, stream);
}
inline constexpr GroupKernels kRandomKernels = {&LoadTransferKernels, &StartAndCount};

// A call, and what each rank has done of it.
struct Step {
  std::unique_ptr<RandomCall> call;
  std::vector<Status> entered;  // indexed by rank
  std::vector<uint8_t> is_entered, is_launched;
};

// Calls that a device enters, and then launches, one after the other.
struct Program {
  std::vector<Step> steps;
  int64_t run = 0;
};

// Returns one to four programs of one to four calls each.
inline std::vector<Program> RandomPrograms(Random& random, int ranks, int64_t lane,
                                           const harness::Options& options) {
  std::vector<Program> result;
  for (int programs = Uniform(random, 1, 4); programs > 0; --programs) {
    Program program;
    std::vector<RandomDispatch*> dispatches;
    for (int calls = Uniform(random, 1, 4); calls > 0; --calls) {
      std::unique_ptr<RandomCall> call;
      const int kind = dispatches.empty() ? 0 : Uniform(random, 0, 2);
      if (kind == 0) {
        Shape shape = harness::RandomShape(random, ranks, options);
        shape.counts_arrivals = false;
        auto dispatch = std::make_unique<RandomDispatch>(shape, lane, kRandomKernels);
        dispatches.push_back(dispatch.get());
        call = std::move(dispatch);
      } else {
        RandomDispatch* const dispatch = dispatches[random() % dispatches.size()];
        Shape shape = harness::Varied(random, dispatch->shape, options);
        shape.routing = dispatch->shape.routing;
        shape.counts_arrivals = false;
        if (kind == 1) {
          call = std::make_unique<RandomRedispatch>(shape, dispatch, lane, kRandomKernels);
        } else {
          call = std::make_unique<RandomCombine>(shape, dispatch, lane, kRandomKernels);
        }
      }
      program.steps.push_back({.call = std::move(call)});
    }
    result.push_back(std::move(program));
  }
  return result;
}

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_RUNTIME_RANDOM_PROGRAM_H_
