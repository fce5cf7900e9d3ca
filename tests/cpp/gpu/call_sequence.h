// Calls in a row on all ranks: their inputs, launches, and the comparison of every output.
#ifndef JAX_EP_TESTS_CPP_GPU_CALL_SEQUENCE_H_
#define JAX_EP_TESTS_CPP_GPU_CALL_SEQUENCE_H_

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/cpp/gpu/contract.h"
#include "tests/cpp/gpu/group.h"
#include "tests/cpp/gpu/random_inputs.h"
#include "tests/cpp/gpu/transfer_calls.h"

namespace harness {

// One dispatch, with all that later calls need.
struct Dispatched {
  Shape shape;
  std::vector<HostPlan> plans;
  std::vector<Bytes> x, scales;
  std::vector<std::vector<float>> weights;
  std::vector<DispatchCall> calls;  // indexed by rank

  jax_ep::PlanOperands Operands(int r) const {
    const jax_ep::PlanResults& plan = calls[r].plan;
    return {plan.row_offsets, plan.row_source, plan.partial_sum_index, plan.destination,
            plan.status};
  }
};

class Sequence {
 public:
  Sequence(Group* group, Random* random) : group_(*group), random_(*random) {}

  std::shared_ptr<Dispatched> AddDispatch(const Shape& shape) {
    auto state = std::make_shared<Dispatched>();
    state->shape = shape;
    state->calls.resize(group_.size());
    const Routing& sizes = shape.routing;
    const int64_t tokens = sizes.tokens, choices = tokens * sizes.top_k, rows = sizes.rows;
    const uint64_t site = ++sites_;
    for (int r = 0; r < group_.size(); ++r) {
      DispatchCall& call = state->calls[r];
      call.transfer = Transfer(r, shape, site);
      call.control = group_.ranks[r].control;
      call.x = group_.Allocate<uint8_t>(r, tokens * shape.row_bytes());
      call.scales = group_.Allocate<float>(r, tokens * shape.num_scales);
      call.topk_ids = group_.Allocate<int32_t>(r, choices);
      call.topk_weights = group_.Allocate<float>(r, choices);
      call.rows = group_.Allocate<uint8_t>(r, rows * shape.row_bytes());
      call.row_scales = group_.Allocate<float>(r, rows * shape.num_scales);
      call.row_weights = group_.Allocate<float>(r, rows);
      call.arrivals = Arrivals(r, shape);
      jax_ep::PlanResults& plan = call.plan;
      plan.group_sizes = group_.Allocate<int32_t>(r, sizes.local());
      plan.real_group_sizes = group_.Allocate<int32_t>(r, sizes.local());
      plan.row_offsets = group_.Allocate<int32_t>(r, sizes.local() + 1);
      plan.row_source = group_.Allocate<int32_t>(r, 3 * rows);
      plan.partial_sum_index = group_.Allocate<int32_t>(r, rows);
      plan.kept = group_.Allocate<bool>(r, choices);
      plan.destination = group_.Allocate<int32_t>(r, choices);
      for (int32_t** scalar :
           {&plan.num_received, &plan.num_dropped, &plan.num_bad_ids, &plan.status}) {
        *scalar = group_.Allocate<int32_t>(r, 1);
      }
    }
    fills_.push_back([=, this] {
      Shape& now = state->shape;
      now.routing.ids = RandomIds(random_, now.routing);
      state->plans = MakePlans(now.routing);
      state->x.clear();
      state->scales.clear();
      state->weights.clear();
      for (int r = 0; r < group_.size(); ++r) {
        const DispatchCall& call = state->calls[r];
        state->x.push_back(RandomRows(random_, tokens, now));
        state->weights.push_back(RandomFloats(random_, choices));
        group_.Refill(r, static_cast<const uint8_t*>(call.x), state->x[r]);
        state->scales.push_back(RandomBytes(random_, tokens * now.scale_bytes()));
        group_.Refill(r, reinterpret_cast<const uint8_t*>(call.scales), state->scales[r]);
        group_.Refill(r, call.topk_ids, now.routing.ids[r]);
        group_.Refill(r, call.topk_weights, state->weights[r]);
      }
      if (!now.has_weights) state->weights.clear();
    });
    launches_.push_back([=, this](int r) {
      const DispatchCall& call = state->calls[r];
      STATUS_OK(LaunchDispatch(call, group_.ranks[r].stream));
      Overwrite(r, shape, call);
    });
    checks_.push_back([=, this] { CheckDispatch(*state); });
    return state;
  }

  // `shape` must have the dispatch's routing, but may differ in all else.
  std::shared_ptr<std::vector<RedispatchCall>> AddRedispatch(
      const std::shared_ptr<Dispatched>& dispatched, Shape shape) {
    shape.routing = dispatched->shape.routing;
    const Routing& sizes = shape.routing;
    const int64_t tokens = sizes.tokens, choices = tokens * sizes.top_k, rows = sizes.rows;
    auto calls = std::make_shared<std::vector<RedispatchCall>>(group_.size());
    auto x = std::make_shared<std::vector<Bytes>>();
    auto scales = std::make_shared<std::vector<Bytes>>();
    auto weights = std::make_shared<std::vector<std::vector<float>>>();
    const uint64_t site = ++sites_;
    for (int r = 0; r < group_.size(); ++r) {
      RedispatchCall& call = (*calls)[r];
      call.transfer = Transfer(r, shape, site);
      call.control = group_.ranks[r].control;
      call.plan = dispatched->Operands(r);
      call.x = group_.Allocate<uint8_t>(r, tokens * shape.row_bytes());
      call.scales = group_.Allocate<float>(r, tokens * shape.num_scales);
      call.topk_weights = group_.Allocate<float>(r, choices);
      call.rows = group_.Allocate<uint8_t>(r, rows * shape.row_bytes());
      call.row_scales = group_.Allocate<float>(r, rows * shape.num_scales);
      call.row_weights = group_.Allocate<float>(r, rows);
      call.arrivals = Arrivals(r, shape);
    }
    fills_.push_back([=, this] {
      x->clear();
      scales->clear();
      weights->clear();
      for (int r = 0; r < group_.size(); ++r) {
        x->push_back(RandomRows(random_, tokens, shape));
        weights->push_back(RandomFloats(random_, choices));
        group_.Refill(r, static_cast<const uint8_t*>((*calls)[r].x), (*x)[r]);
        scales->push_back(RandomBytes(random_, tokens * shape.scale_bytes()));
        group_.Refill(r, reinterpret_cast<const uint8_t*>((*calls)[r].scales), (*scales)[r]);
        group_.Refill(r, (*calls)[r].topk_weights, (*weights)[r]);
      }
      if (!shape.has_weights) weights->clear();
    });
    launches_.push_back([=, this](int r) {
      const RedispatchCall& call = (*calls)[r];
      STATUS_OK(LaunchRedispatch(call, group_.ranks[r].stream));
      Overwrite(r, shape, call);
    });
    const auto expect = [=, this](int r) {
      CheckRows("redispatch", r, shape, dispatched->plans[r], *x, *scales, *weights, (*calls)[r]);
      CheckArrivals("redispatch", r, shape, dispatched->plans[r], (*calls)[r].arrivals, 0);
    };
    checks_.push_back([=, this] {
      for (int r = 0; r < group_.size(); ++r) expect(r);
    });
    is_whole_of.push_back([=, this](int r) {
      const RedispatchCall& call = (*calls)[r];
      const Bytes got = group_.Download<uint8_t>(r, call.rows, rows * shape.row_bytes());
      const Bytes scales = group_.Download<uint8_t>(r, call.row_scales, rows * shape.scale_bytes());
      if (AllNan(got, shape.type) && AllNan(scales, jax_ep::kF32)) return false;
      expect(r);
      return true;
    });
    return calls;
  }

  std::shared_ptr<std::vector<CombineCall>> AddCombine(
      const std::shared_ptr<Dispatched>& dispatched, Shape shape) {
    shape.routing = dispatched->shape.routing;
    const Routing& sizes = shape.routing;
    const int64_t tokens = sizes.tokens, choices = tokens * sizes.top_k, rows = sizes.rows;
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
      call.y = group_.Allocate<uint8_t>(r, rows * shape.row_bytes());
      call.row_weights = group_.Allocate<float>(r, rows);
      call.row_scalars = group_.Allocate<float>(r, rows);
      call.out = group_.Allocate<uint8_t>(r, tokens * shape.row_bytes());
      call.assignment_scalars = group_.Allocate<float>(r, choices);
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
             group_.Download<float>(r, call.assignment_scalars, choices),
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
  // One rank's results of a dispatch, after a Synchronize.
  void CheckDispatchOf(const Dispatched& state, int r) {
    const HostPlan& want = state.plans[r];
    const jax_ep::PlanResults& plan = state.calls[r].plan;
    const auto expect = [&](const char* what, const auto* address, const auto& values) {
      using Value = typename std::decay_t<decltype(values)>::value_type;
      Expect(what, r, group_.Download<Value>(r, address, values.size()), values);
    };
    expect("plan.group_sizes", plan.group_sizes, want.group_sizes);
    expect("plan.real_group_sizes", plan.real_group_sizes, want.real_group_sizes);
    expect("plan.row_offsets", plan.row_offsets, want.row_offsets);
    expect("plan.row_source", plan.row_source, want.row_source);
    expect("plan.partial_sum_index", plan.partial_sum_index, want.partial_sum_index);
    expect("plan.kept", plan.kept, want.kept);
    expect("plan.destination", plan.destination, want.destination);
    expect("plan.num_received", plan.num_received, std::vector<int32_t>{want.num_received});
    expect("plan.num_dropped", plan.num_dropped, std::vector<int32_t>{want.num_dropped});
    expect("plan.num_bad_ids", plan.num_bad_ids, std::vector<int32_t>{want.num_bad_ids});
    expect("plan.status", plan.status, std::vector<int32_t>{0});
    CheckRows("dispatch", r, state.shape, want, state.x, state.scales, state.weights,
              state.calls[r]);
    CheckArrivals("dispatch", r, state.shape, want, state.calls[r].arrivals, 1);
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
  uint64_t* Arrivals(int r, const Shape& shape) {
    if (!shape.counts_arrivals) return nullptr;
    return group_.Upload(r, std::vector<uint64_t>(shape.num_arrivals()));
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
    const Routing& sizes = shape.routing;
    return {.call_site = site,
            .shape = {.num_tokens = sizes.tokens,
                      .hidden = shape.hidden,
                      .top_k = sizes.top_k,
                      .num_experts = sizes.experts,
                      .num_ranks = sizes.ranks,
                      .num_rows = sizes.rows,
                      .format = shape.format()},
            .num_sms = shape.has_own_num_sms ? 1 + (shape.num_sms + 7 * r) % 13 : shape.num_sms,
            .row_align = sizes.align,
            .zero_tail = shape.zero_tail,
            .has_weights = shape.has_weights,
            .has_scalars = shape.has_scalars,
            .allow_low_latency = shape.allow_low_latency,
            .counts_arrivals = shape.counts_arrivals,
            .ring_chunks = shape.ring_chunks};
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

  void CheckArrivals(const char* what, int r, const Shape& shape, const HostPlan& plan,
                     const uint64_t* arrivals, int first) {
    if (!shape.counts_arrivals) return;
    std::vector<int> counts(shape.num_arrivals());
    counts[0] = first;
    for (int row = 0; row < plan.row_offsets.back(); ++row) {
      ++counts[1 + row / jax_ep::kArrivalRows];
    }
    // Which call wrote last cannot be told if it counted nothing.
    if (*std::max_element(counts.begin(), counts.end()) == 0) return;
    std::vector<uint64_t> found = group_.Download<uint64_t>(r, arrivals, counts.size());
    const uint64_t latest = *std::max_element(found.begin(), found.end());
    const uint64_t sequence = latest >> jax_ep::kArrivalCountBits;
    std::vector<uint64_t> want(counts.size());
    for (size_t i = 0; i < counts.size(); ++i) {
      want[i] = counts[i] == 0 ? 0 : jax_ep::ArrivalValue(sequence, counts[i]);
      // Earlier calls may have had more rows.
      if (counts[i] == 0 && found[i] < jax_ep::ArrivalValue(sequence, 0)) found[i] = 0;
    }
    Expect(jax_ep::Concatenate(what, ".arrivals").c_str(), r, found, want);
  }

  template <typename Call>
  void CheckRows(const char* what, int r, const Shape& shape, const HostPlan& plan,
                 const std::vector<Bytes>& x, const std::vector<Bytes>& scales,
                 const std::vector<std::vector<float>>& weights, const Call& call) {
    Bytes want, want_scales;
    std::vector<float> want_weights;
    DispatchRows(shape.routing, plan, shape.row_bytes(), x, weights, &want, &want_weights);
    DispatchScales(shape.routing, plan, shape.num_scales, scales, &want_scales);
    if (!shape.zero_tail) {
      want.resize(plan.row_offsets.back() * shape.row_bytes());
      want_scales.resize(plan.row_offsets.back() * shape.scale_bytes());
      want_weights.resize(plan.row_offsets.back());
    }
    const auto expect = [&](const char* name, const void* address, const auto& values) {
      using Value = typename std::decay_t<decltype(values)>::value_type;
      Expect(jax_ep::Concatenate(what, name).c_str(), r,
             group_.Download<Value>(r, address, values.size()), values);
    };
    expect(".rows", call.rows, want);
    expect(".row_scales", call.row_scales, want_scales);
    if (shape.has_weights) expect(".row_weights", call.row_weights, want_weights);
  }

  void CheckDispatch(const Dispatched& state) {
    for (int r = 0; r < group_.size(); ++r) CheckDispatchOf(state, r);
  }

  Group& group_;
  Random& random_;
  uint64_t sites_ = 0;
  std::vector<std::function<void()>> fills_;
  std::vector<std::function<void(int)>> launches_;
  std::vector<std::function<void()>> checks_;
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_CALL_SEQUENCE_H_
