// Calls in a row on all ranks: their inputs, launches, and the comparison of every output.
#ifndef JAX_EP_TESTS_CPP_GPU_TRANSFER_CALL_SEQUENCE_H_
#define JAX_EP_TESTS_CPP_GPU_TRANSFER_CALL_SEQUENCE_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/cpp/gpu/transfer/call_checks.h"
#include "tests/cpp/gpu/transfer/contract.h"
#include "tests/cpp/gpu/transfer/group.h"
#include "tests/cpp/gpu/transfer/random_inputs.h"
#include "tests/cpp/gpu/transfer/transfer_calls.h"

namespace harness {

class Sequence {
 public:
  Sequence(Group* group, Random* random) : group_(*group), random_(*random) {}

  std::shared_ptr<Dispatched> AddDispatch(const Shape& shape) {
    auto state = std::make_shared<Dispatched>();
    state->shape = shape;
    state->calls.resize(group_.size());
    const Routing& sizes = shape.routing;
    const int64_t assignments = int64_t{sizes.tokens} * sizes.top_k, rows = sizes.rows;
    const uint64_t site = ++sites_;
    for (int r = 0; r < group_.size(); ++r) {
      DispatchCall& call = state->calls[r];
      call.transfer = Transfer(r, shape, site);
      call.control = group_.ranks[r].control;
      Allocate(r, shape, &call);
      call.topk_ids = group_.Allocate<int32_t>(r, assignments);
      jax_ep::PlanResults& plan = call.plan;
      plan.group_sizes = group_.Allocate<int32_t>(r, sizes.local());
      plan.real_group_sizes = group_.Allocate<int32_t>(r, sizes.local());
      plan.row_offsets = group_.Allocate<int32_t>(r, sizes.local() + 1);
      plan.row_source = group_.Allocate<int32_t>(r, 3 * rows);
      plan.partial_sum_index = group_.Allocate<int32_t>(r, rows);
      plan.kept = group_.Allocate<bool>(r, assignments);
      plan.destination = group_.Allocate<int32_t>(r, assignments);
      for (int32_t** scalar :
           {&plan.num_received, &plan.num_dropped, &plan.num_bad_ids, &plan.status}) {
        *scalar = group_.Allocate<int32_t>(r, 1);
      }
      if (sizes.domain_size == 0) continue;
      call.forwarding.token_ranks = group_.Allocate<uint32_t>(r, sizes.num_token_ranks());
      call.forwarding.partial_sum_index = group_.Allocate<int32_t>(r, rows);
    }
    fills_.push_back([=, this] {
      Shape& now = state->shape;
      now.routing.ids = make_ids(random_, now.routing);
      state->plans = MakePlans(now.routing);
      for (int r = 0; r < group_.size(); ++r) {
        group_.Refill(r, state->calls[r].topk_ids, now.routing.ids[r]);
      }
      state->tokens = FillTokens(now, state->calls);
    });
    launches_.push_back([=, this](int r) {
      const DispatchCall& call = state->calls[r];
      STATUS_OK(LaunchDispatch(call, group_.ranks[r].stream));
      Overwrite(r, shape, call);
    });
    checks_.push_back([=, this] {
      for (int r = 0; r < group_.size(); ++r) CheckDispatch(&group_, *state, r);
    });
    return state;
  }

  // `shape` must have the dispatch's routing, but may differ in all else.
  std::shared_ptr<std::vector<RedispatchCall>> AddRedispatch(
      const std::shared_ptr<Dispatched>& dispatched, Shape shape) {
    shape.routing = dispatched->shape.routing;
    const int64_t rows = shape.routing.rows;
    auto calls = std::make_shared<std::vector<RedispatchCall>>(group_.size());
    auto tokens = std::make_shared<Tokens>();
    const uint64_t site = ++sites_;
    for (int r = 0; r < group_.size(); ++r) {
      RedispatchCall& call = (*calls)[r];
      call.transfer = Transfer(r, shape, site);
      call.control = group_.ranks[r].control;
      call.plan = dispatched->Operands(r);
      call.forwarding = dispatched->Forwarding(r);
      Allocate(r, shape, &call);
    }
    fills_.push_back([=, this] { *tokens = FillTokens(shape, *calls); });
    launches_.push_back([=, this](int r) {
      const RedispatchCall& call = (*calls)[r];
      STATUS_OK(LaunchRedispatch(call, group_.ranks[r].stream));
      Overwrite(r, shape, call);
    });
    const auto expect = [=, this](int r) {
      CheckRows("redispatch", &group_, r, shape, dispatched->plans[r], *tokens, (*calls)[r], 0);
    };
    checks_.push_back([=, this] {
      for (int r = 0; r < group_.size(); ++r) expect(r);
    });
    is_whole_of.push_back([=, this](int r) {
      const RedispatchCall& call = (*calls)[r];
      const Bytes got = group_.Download<uint8_t>(r, call.rows, rows * shape.row_bytes());
      const Bytes scales = group_.Download<uint8_t>(r, call.row_scales, rows * shape.scale_bytes());
      if (AllNan(got, shape.type) && AllNan(scales, shape.scale_type)) return false;
      expect(r);
      return true;
    });
    return calls;
  }

  std::shared_ptr<std::vector<CombineCall>> AddCombine(
      const std::shared_ptr<Dispatched>& dispatched, Shape shape) {
    shape.routing = dispatched->shape.routing;
    const Routing& sizes = shape.routing;
    const int64_t tokens = sizes.tokens, assignments = tokens * sizes.top_k, rows = sizes.rows;
    auto calls = std::make_shared<std::vector<CombineCall>>(group_.size());
    auto y = std::make_shared<std::vector<Bytes>>();
    auto weights = std::make_shared<std::vector<std::vector<float>>>();
    auto scalars = std::make_shared<std::vector<std::vector<float>>>();
    const uint64_t site = ++sites_;
    for (int r = 0; r < group_.size(); ++r) {
      CombineCall& call = (*calls)[r];
      call.transfer = Transfer(r, shape, site);
      call.control = group_.ranks[r].control;
      call.plan = dispatched->Operands(r);
      call.forwarding = dispatched->Forwarding(r);
      call.y = group_.Allocate<uint8_t>(r, rows * shape.row_bytes());
      call.row_weights = group_.Allocate<float>(r, rows);
      call.row_scalars = group_.Allocate<float>(r, rows);
      call.out = group_.Allocate<uint8_t>(r, tokens * shape.row_bytes());
      call.assignment_scalars = group_.Allocate<float>(r, assignments);
    }
    fills_.push_back([=, this] {
      y->clear();
      weights->clear();
      scalars->clear();
      for (int r = 0; r < group_.size(); ++r) {
        y->push_back(RandomRows(random_, rows, shape));
        weights->push_back(RandomFloats(random_, rows));
        scalars->push_back(RandomFloats(random_, rows));
        PoisonTail(dispatched->plans[r], shape, &(*y)[r], &(*weights)[r], &(*scalars)[r]);
        group_.Refill(r, static_cast<const uint8_t*>((*calls)[r].y), (*y)[r]);
        group_.Refill(r, (*calls)[r].row_weights, (*weights)[r]);
        group_.Refill(r, (*calls)[r].row_scalars, (*scalars)[r]);
      }
      if (!shape.has_weights) weights->clear();
      if (!shape.has_scalars) scalars->clear();
    });
    launches_.push_back(
        [=, this](int r) { STATUS_OK(LaunchCombine((*calls)[r], group_.ranks[r].stream)); });
    struct Results {
      std::vector<Bytes> out;
      std::vector<std::vector<float>> assignment_scalars;
    };
    const auto expected = [=] {
      Results want;
      CombineRows(dispatched->shape.routing, dispatched->plans, shape.hidden, shape.type, *y,
                  *weights, *scalars, &want.out, &want.assignment_scalars);
      return want;
    };
    const auto expect = [=, this](int r, const Results& want) {
      const CombineCall& call = (*calls)[r];
      Expect("combine.out", r, group_.Download<uint8_t>(r, call.out, want.out[r].size()),
             want.out[r]);
      if (!shape.has_scalars) return;
      Expect("combine.assignment_scalars", r,
             group_.Download<float>(r, call.assignment_scalars, assignments),
             want.assignment_scalars[r]);
    };
    checks_.push_back([=, this] {
      const Results want = expected();
      for (int r = 0; r < group_.size(); ++r) expect(r, want);
    });
    combined.push_back([=, this](int r) {
      const int64_t bytes = tokens * shape.row_bytes();
      if (AllNan(group_.Download<uint8_t>(r, (*calls)[r].out, bytes), shape.type)) return false;
      expect(r, expected());
      return true;
    });
    return calls;
  }

  // Makes the ids of each dispatch, from all ranks' experts.
  std::function<std::vector<std::vector<int32_t>>(Random&, const Routing&)> make_ids = RandomIds;

  // For each combine and redispatch: whether a rank's results are whole. Otherwise all of them must
  // be NaN.
  std::vector<std::function<bool(int r)>> combined;
  std::vector<std::function<bool(int r)>> is_whole_of;

  // Overwrites operands when a call ends, as XLA may. Fill them again before the next launch.
  bool overwrites_operands = false;

  int size() const { return static_cast<int>(launches_.size()); }
  void Fill() {
    for (const auto& fill : fills_) fill();
  }
  void Launch(int call, int rank) {
    CUDA_OK(cudaSetDevice(group_.ranks[rank].device));
    launches_[call](rank);
  }
  void LaunchAll() {
    for (int call = 0; call < size(); ++call) {
      for (int r = 0; r < group_.size(); ++r) Launch(call, r);
    }
  }
  // Enqueues all calls of a rank before any of the next rank.
  void LaunchRankByRank() {
    for (int r = 0; r < group_.size(); ++r) {
      for (int call = 0; call < size(); ++call) Launch(call, r);
    }
  }
  void Check() {
    group_.Synchronize();
    for (const auto& check : checks_) check();
    for (int r = 0; r < group_.size(); ++r) {
      const jax_ep::AbortRecord& record = *group_.ranks[r].record;
      if (!record.posted) continue;
      Fail(jax_ep::Concatenate("rank ", r, " reported outcome ", static_cast<int>(record.outcome),
                               " of peer ", record.peer, " in sequence ", record.sequence));
    }
  }

 private:
  // The buffers of a dispatch or a redispatch.
  template <typename Call>
  void Allocate(int r, const Shape& shape, Call* call) {
    const Routing& sizes = shape.routing;
    const int64_t tokens = sizes.tokens, rows = sizes.rows;
    call->x = group_.Allocate<uint8_t>(r, tokens * shape.row_bytes());
    call->scales = group_.Allocate<uint8_t>(r, tokens * shape.scale_bytes());
    call->topk_weights = group_.Allocate<float>(r, tokens * sizes.top_k);
    call->rows = group_.Allocate<uint8_t>(r, rows * shape.row_bytes());
    call->row_scales = group_.Allocate<uint8_t>(r, rows * shape.scale_bytes());
    call->row_weights = group_.Allocate<float>(r, rows);
    if (!shape.counts_arrivals) return;
    call->arrivals = group_.Upload(r, std::vector<uint64_t>(shape.num_arrivals()));
  }

  template <typename Call>
  Tokens FillTokens(const Shape& shape, const std::vector<Call>& calls) {
    const int64_t tokens = shape.routing.tokens;
    Tokens result;
    for (int r = 0; r < group_.size(); ++r) {
      result.x.push_back(RandomRows(random_, tokens, shape));
      result.weights.push_back(RandomFloats(random_, tokens * shape.routing.top_k));
      result.scales.push_back(RandomBytes(random_, tokens * shape.scale_bytes()));
      group_.Refill(r, static_cast<const uint8_t*>(calls[r].x), result.x[r]);
      group_.Refill(r, static_cast<const uint8_t*>(calls[r].scales), result.scales[r]);
      group_.Refill(r, calls[r].topk_weights, result.weights[r]);
    }
    if (!shape.has_weights) result.weights.clear();
    return result;
  }

  template <typename Call>
  void Overwrite(int r, const Shape& shape, const Call& call) {
    if (!overwrites_operands) return;
    const int64_t tokens = shape.routing.tokens;
    const auto overwrite = [&](const void* address, int64_t bytes) {
      CUDA_OK(cudaMemsetAsync(const_cast<void*>(address), 0xff, bytes, group_.ranks[r].stream));
    };
    overwrite(call.x, tokens * shape.row_bytes());
    overwrite(call.scales, tokens * shape.scale_bytes());
    overwrite(call.topk_weights, tokens * shape.routing.top_k * sizeof(float));
  }

  jax_ep::TransferCall Transfer(int r, const Shape& shape, uint64_t site) const {
    return {.call_site = site,
            .shape = shape.transfer_shape(),
            .num_sms = shape.has_own_num_sms ? 1 + (shape.num_sms + 7 * r) % 13 : shape.num_sms,
            .row_align = shape.routing.align,
            .zero_tail = shape.zero_tail,
            .has_weights = shape.has_weights,
            .has_scalars = shape.has_scalars,
            .allow_low_latency = shape.allow_low_latency,
            .counts_arrivals = shape.counts_arrivals,
            .ring_chunks = shape.ring_chunks,
            .rail_slots = shape.rail_slots,
            .chunk_tokens = shape.chunk_tokens};
  }

  // No operation may read a tail or padding.
  static void PoisonTail(const HostPlan& plan, const Shape& shape, Bytes* y,
                         std::vector<float>* weights, std::vector<float>* scalars) {
    for (int row = 0; row < shape.routing.rows; ++row) {
      if (plan.row_source[3 * row] >= 0) continue;
      (*weights)[row] = (*scalars)[row] = NAN;
      std::memset(y->data() + row * shape.row_bytes(), 0xff, shape.row_bytes());
    }
  }

  Group& group_;
  Random& random_;
  uint64_t sites_ = 0;
  std::vector<std::function<void()>> fills_;
  std::vector<std::function<void(int)>> launches_;
  std::vector<std::function<void()>> checks_;
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_TRANSFER_CALL_SEQUENCE_H_
