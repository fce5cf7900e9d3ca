// Random calls of each operation: their inputs, their launches, and the comparison of every result
// with the contract.
#ifndef JAX_EP_TESTS_CPP_EMULATION_PROGRAMS_RANDOM_OPERATIONS_H_
#define JAX_EP_TESTS_CPP_EMULATION_PROGRAMS_RANDOM_OPERATIONS_H_

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "tests/cpp/emulation/programs/random_call.h"
#include "tests/cpp/emulation/programs/random_results.h"

namespace jax_ep::testing {

using harness::Bytes;
using harness::HostPlan;

// Returns right, ended or wrong, with what differs from right results.
inline Verdict VerdictOf(const Comparison& right, const Comparison& safe, std::string* why) {
  if (right.difference.empty()) return Verdict::kRight;
  if (safe.difference.empty()) return Verdict::kEnded;
  *why = right.difference + "; not safe: " + safe.difference;
  return Verdict::kWrong;
}

// The tokens of a dispatch or a redispatch with their weights, and the rows that they become, of
// all ranks.
class SentRows {
 public:
  explicit SentRows(const RandomCall& call) : call_(call) {}

  void Fill(Random& random) {
    const Shape& shape = call_.shape;
    const harness::Routing& sizes = shape.routing;
    x_.clear();
    weights_.clear();
    rows_.assign(sizes.ranks, Unwritten<uint8_t>(int64_t{sizes.rows} * shape.row_bytes()));
    row_weights_.assign(sizes.ranks, Unwritten<float>(sizes.rows));
    for (int r = 0; r < sizes.ranks; ++r) {
      x_.push_back(harness::RandomRows(random, sizes.tokens, shape));
      weights_.push_back(harness::RandomFloats(random, int64_t{sizes.tokens} * sizes.top_k));
    }
  }

  template <typename Buffers>
  void Bind(int r, Buffers* buffers) {
    buffers->x = x_[r].data();
    buffers->topk_weights = weights_[r].data();
    buffers->rows = rows_[r].data();
    buffers->row_weights = row_weights_[r].data();
  }

  void Compare(Comparison& compare, int r, const HostPlan& plan) const {
    const Shape& shape = call_.shape;
    Bytes want;
    std::vector<float> want_weights;
    const std::vector<std::vector<float>> none;
    harness::DispatchRows(shape.routing, plan, shape.row_bytes(), x_,
                          shape.has_weights ? weights_ : none, &want, &want_weights);
    if (!shape.zero_tail) {
      want.resize(plan.row_offsets.back() * shape.row_bytes());
      want_weights.resize(plan.row_offsets.back());
    }
    compare.Equal("rows", rows_[r].data(), want);
    if (shape.has_weights) compare.Equal("row_weights", row_weights_[r].data(), want_weights);
  }

  void CompareSafe(Comparison& compare, int r) const {
    compare.AllNan("rows", rows_[r], call_.shape.type);
    if (call_.shape.has_weights) compare.AllNan("row_weights", row_weights_[r]);
  }

 private:
  const RandomCall& call_;
  std::vector<Bytes> x_, rows_;
  std::vector<std::vector<float>> weights_, row_weights_;
};

class RandomDispatch : public RandomCall {
 public:
  RandomDispatch(const Shape& shape, int64_t lane, const GroupKernels& kernels,
                 const LocalRanks& local = {})
      : RandomCall(Operation::kDispatch, shape, lane, kernels, local),
        plan_of_(shape.routing.ranks) {}

  void Fill(Random& random) override {
    shape.routing.ids = harness::RandomIds(random, shape.routing);
    plans = harness::MakePlans(shape.routing);
    sent_.Fill(random);
    for (PlanBuffers& plan : plan_of_) plan.Forget(shape.routing);
  }

  Status Launch(int r, ControlBlock* control, cudaStream_t stream) override {
    PreparedDispatch prepared;
    if (Status status = PrepareDispatch(Transfer(r), &prepared); !status.ok()) return status;
    DispatchBuffers buffers;
    sent_.Bind(r, &buffers);
    buffers.topk_ids = shape.routing.ids[r].data();
    buffers.plan = plan_of_[r].Results();
    buffers.forwarding = plan_of_[r].Forwarding();
    return jax_ep::Launch(prepared, control, buffers, stream);
  }

  Verdict Check(int r, std::string* why) const override {
    Comparison right, safe;
    plan_of_[r].Compare(right, plans[r]);
    sent_.Compare(right, r, plans[r]);
    plan_of_[r].CompareSafe(safe);
    sent_.CompareSafe(safe, r);
    return VerdictOf(right, safe, why);
  }

  PlanOperands Operands(int r) { return plan_of_[r].Operands(); }
  ForwardingOperands Forwarding(int r) const { return plan_of_[r].ForwardingToRead(); }
  // An Outcome, after an execution.
  int status(int r) const { return plan_of_[r].status(); }

  std::vector<HostPlan> plans;  // expected

 private:
  SentRows sent_{*this};
  std::vector<PlanBuffers> plan_of_;
};

// A redispatch or a combine, along the plan of a dispatch. Sometimes one rank is given a poisoned
// plan.
class CallWithPlan : public RandomCall {
 public:
  CallWithPlan(Operation operation, const Shape& shape, RandomDispatch* dispatch, int64_t lane,
               const GroupKernels& kernels, const LocalRanks& local)
      : RandomCall(operation, shape, lane, kernels, local), dispatch_(*dispatch) {}

  void Fill(Random& random) override {
    shape.routing.ids = dispatch_.shape.routing.ids;
    poisoned_ = Uniform(random, 0, 7) == 0 ? Uniform(random, 0, ranks() - 1) : -1;
  }

 protected:
  PlanOperands Operands(int r) {
    static int32_t poison = static_cast<int32_t>(Outcome::kTimeout);
    PlanOperands plan = dispatch_.Operands(r);
    if (r == poisoned_) plan.status = &poison;
    return plan;
  }

  RandomDispatch& dispatch_;
  int poisoned_ = -1;  // a rank
};

class RandomRedispatch : public CallWithPlan {
 public:
  RandomRedispatch(const Shape& shape, RandomDispatch* dispatch, int64_t lane,
                   const GroupKernels& kernels, const LocalRanks& local = {})
      : CallWithPlan(Operation::kRedispatch, shape, dispatch, lane, kernels, local) {}

  void Fill(Random& random) override {
    CallWithPlan::Fill(random);
    sent_.Fill(random);
  }

  Status Launch(int r, ControlBlock* control, cudaStream_t stream) override {
    PreparedRedispatch prepared;
    if (Status status = PrepareRedispatch(Transfer(r), &prepared); !status.ok()) return status;
    RedispatchBuffers buffers;
    sent_.Bind(r, &buffers);
    buffers.plan = Operands(r);
    buffers.forwarding = dispatch_.Forwarding(r);
    return jax_ep::Launch(prepared, control, buffers, stream);
  }

  Verdict Check(int r, std::string* why) const override {
    Comparison right, safe;
    sent_.Compare(right, r, dispatch_.plans[r]);
    sent_.CompareSafe(safe, r);
    if (r == poisoned_) right = safe;
    return VerdictOf(right, safe, why);
  }

 private:
  SentRows sent_{*this};
};

class RandomCombine : public CallWithPlan {
 public:
  RandomCombine(const Shape& shape, RandomDispatch* dispatch, int64_t lane,
                const GroupKernels& kernels, const LocalRanks& local = {})
      : CallWithPlan(Operation::kCombine, shape, dispatch, lane, kernels, local) {}

  void Fill(Random& random) override {
    CallWithPlan::Fill(random);
    y_.clear();
    weights_.clear();
    scalars_.clear();
    out_.assign(ranks(), Unwritten<uint8_t>(tokens() * shape.row_bytes()));
    assignment_scalars_.assign(ranks(), Unwritten<float>(assignments()));
    for (int r = 0; r < ranks(); ++r) {
      y_.push_back(harness::RandomRows(random, rows(), shape));
      weights_.push_back(harness::RandomFloats(random, rows()));
      scalars_.push_back(harness::RandomFloats(random, rows()));
      PoisonTail(r);
    }
    const std::vector<std::vector<float>> none;
    harness::CombineRows(shape.routing, dispatch_.plans, shape.hidden, shape.type, y_,
                         shape.has_weights ? weights_ : none, shape.has_scalars ? scalars_ : none,
                         &want_out_, &want_scalars_);
  }

  Status Launch(int r, ControlBlock* control, cudaStream_t stream) override {
    PreparedCombine prepared;
    if (Status status = PrepareCombine(Transfer(r), &prepared); !status.ok()) return status;
    CombineBuffers buffers;
    buffers.y = y_[r].data();
    buffers.plan = Operands(r);
    buffers.forwarding = dispatch_.Forwarding(r);
    buffers.row_weights = weights_[r].data();
    buffers.row_scalars = scalars_[r].data();
    buffers.out = out_[r].data();
    buffers.assignment_scalars = assignment_scalars_[r].data();
    return jax_ep::Launch(prepared, control, buffers, stream);
  }

  Verdict Check(int r, std::string* why) const override {
    Comparison right, safe;
    right.Equal("out", out_[r].data(), want_out_[r]);
    safe.AllNan("out", out_[r], shape.type);
    if (shape.has_scalars) {
      right.Equal("assignment_scalars", assignment_scalars_[r].data(), want_scalars_[r]);
      safe.AllNan("assignment_scalars", assignment_scalars_[r]);
    }
    if (poisoned_ >= 0) right = safe;  // no rank adds up the partial sums of some
    return VerdictOf(right, safe, why);
  }

 private:
  // No operation may read a tail or padding.
  void PoisonTail(int r) {
    for (int64_t row = 0; row < rows(); ++row) {
      if (dispatch_.plans[r].row_source[3 * row] >= 0) continue;
      weights_[r][row] = scalars_[r][row] = NAN;
      std::memset(y_[r].data() + row * shape.row_bytes(), 0xff, shape.row_bytes());
    }
  }

  std::vector<Bytes> y_, out_, want_out_;
  std::vector<std::vector<float>> weights_, scalars_, assignment_scalars_, want_scalars_;
};

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_PROGRAMS_RANDOM_OPERATIONS_H_
