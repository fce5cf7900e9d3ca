// One random call of all ranks at a call site of its own.
#ifndef JAX_EP_TESTS_CPP_EMULATION_PROGRAMS_RANDOM_CALL_H_
#define JAX_EP_TESTS_CPP_EMULATION_PROGRAMS_RANDOM_CALL_H_

#include <numeric>
#include <string>
#include <vector>

#include "ffi/kernels/transfer/launch.h"
#include "ffi/runtime/calls/workspace.h"
#include "ffi/runtime/groups/call_site.h"
#include "tests/cpp/emulation/streams.h"
#include "tests/cpp/gpu/transfer/transfer_random.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep::testing {

using harness::Random;
using harness::Shape;
using harness::Uniform;

// A rank's results of one execution.
enum class Verdict {
  kRight,  // as the contract says, to the bit
  kEnded,  // safe values of a call that has failed
  kWrong,
};

class RandomCall {
 public:
  RandomCall(Operation operation, const Shape& shape, int64_t lane, const GroupKernels& kernels,
             const LocalRanks& local = {})
      : site(Ids(shape.routing.ranks), lane, kernels, local.transport, shape.routing.domain_size),
        operation(operation),
        shape(shape),
        local_(local) {
    CHECK_OK(PlanWorkspace(Transfer(0).shape, &layout_));
  }
  virtual ~RandomCall() = default;

  // New inputs, other results than before.
  virtual void Fill(Random& random) = 0;
  virtual Status Launch(int r, ControlBlock* control, cudaStream_t stream) = 0;
  // Call it when the rank's call has ended. `why` describes wrong results.
  virtual Verdict Check(int r, std::string* why) const = 0;

  int ranks() const { return shape.routing.ranks; }
  int64_t workspace_bytes() const { return layout_.bytes; }

  CallSite site;
  const Operation operation;
  Shape shape;

 protected:
  int64_t tokens() const { return shape.routing.tokens; }
  int64_t assignments() const { return tokens() * shape.routing.top_k; }
  int64_t rows() const { return shape.routing.rows; }

  TransferCall Transfer(int r) const {
    const harness::Routing& sizes = shape.routing;
    return {.call_site = site.id(r - local_.first),
            .shape = {.num_tokens = sizes.tokens,
                      .hidden = shape.hidden,
                      .top_k = sizes.top_k,
                      .num_experts = sizes.experts,
                      .num_ranks = sizes.ranks,
                      .num_rows = sizes.rows,
                      .domain_size = sizes.domain_size,
                      .format = {.payload = shape.type}},
            .num_sms = shape.has_own_num_sms ? 1 + (shape.num_sms + r) % 3 : shape.num_sms,
            .num_lanes = 2,
            .row_align = sizes.align,
            .zero_tail = shape.zero_tail,
            .has_weights = shape.has_weights,
            .has_scalars = shape.has_scalars,
            .allow_low_latency = shape.allow_low_latency,
            .ring_chunks = shape.ring_chunks,
            .rail_slots = shape.rail_slots,
            .chunk_tokens = shape.chunk_tokens};
  }

 private:
  static std::vector<std::vector<int64_t>> Ids(int ranks) {
    std::vector<int64_t> ids(ranks);
    std::iota(ids.begin(), ids.end(), 0);
    return {ids};
  }

  const LocalRanks local_;
  WorkspaceLayout layout_;
};

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_PROGRAMS_RANDOM_CALL_H_
