// Comparison of calls' results with the contract.
#ifndef JAX_EP_TESTS_CPP_GPU_TRANSFER_CALL_CHECKS_H_
#define JAX_EP_TESTS_CPP_GPU_TRANSFER_CALL_CHECKS_H_

#include <algorithm>
#include <string>
#include <vector>

#include "tests/cpp/gpu/transfer/contract.h"
#include "tests/cpp/gpu/transfer/group.h"
#include "tests/cpp/gpu/transfer/random_inputs.h"
#include "tests/cpp/gpu/transfer/transfer_calls.h"

namespace harness {

// The tokens of a call, indexed by rank.
struct Tokens {
  std::vector<Bytes> x, scales;
  std::vector<std::vector<float>> weights;  // none if the call has none
};

// One dispatch, with all that later calls need.
struct Dispatched {
  Shape shape;
  std::vector<HostPlan> plans;
  Tokens tokens;
  std::vector<DispatchCall> calls;  // indexed by rank

  jax_ep::PlanOperands Operands(int r) const {
    const jax_ep::PlanResults& plan = calls[r].plan;
    return {plan.row_offsets, plan.row_source, plan.partial_sum_index, plan.destination,
            plan.status};
  }
  jax_ep::ForwardingOperands Forwarding(int r) const {
    const jax_ep::ForwardingResults& forwarding = calls[r].forwarding;
    return {forwarding.token_ranks, forwarding.partial_sum_index};
  }
};

// Compares what is at a device's address.
template <typename Value>
void ExpectAt(const void* address, const std::string& what, Group* group, int r,
              const std::vector<Value>& values) {
  Expect(what.c_str(), r, group->Download<Value>(r, address, values.size()), values);
}

// `first` is the call's count of received plans.
inline void CheckArrivals(const char* what, Group* group, int r, const Shape& shape,
                          const HostPlan& plan, const uint64_t* arrivals, int first) {
  if (!shape.counts_arrivals) return;
  std::vector<int> counts(shape.num_arrivals());
  counts[0] = first;
  for (int row = 0; row < plan.row_offsets.back(); ++row) {
    ++counts[1 + row / jax_ep::kArrivalRows];
  }
  // Which call wrote last cannot be told if it counted nothing.
  if (*std::max_element(counts.begin(), counts.end()) == 0) return;
  std::vector<uint64_t> found = group->Download<uint64_t>(r, arrivals, counts.size());
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

// Checks the rows of a dispatch or a redispatch, and what goes with them.
template <typename Call>
void CheckRows(const char* what, Group* group, int r, const Shape& shape, const HostPlan& plan,
               const Tokens& tokens, const Call& call, int first_arrival) {
  Bytes want, want_scales;
  std::vector<float> want_weights;
  DispatchRows(shape.routing, plan, shape.row_bytes(), tokens.x, tokens.weights, &want,
               &want_weights);
  DispatchScales(shape.routing, plan, shape.num_scales, shape.scale_type, tokens.scales,
                 &want_scales);
  if (!shape.zero_tail) {
    want.resize(plan.row_offsets.back() * shape.row_bytes());
    want_scales.resize(plan.row_offsets.back() * shape.scale_bytes());
    want_weights.resize(plan.row_offsets.back());
  }
  const auto expect = [&](const char* name, const void* address, const auto& values) {
    ExpectAt(address, jax_ep::Concatenate(what, name), group, r, values);
  };
  expect(".rows", call.rows, want);
  expect(".row_scales", call.row_scales, want_scales);
  if (shape.has_weights) expect(".row_weights", call.row_weights, want_weights);
  CheckArrivals(what, group, r, shape, plan, call.arrivals, first_arrival);
}

// Checks one rank's results of a dispatch, after a Synchronize.
inline void CheckDispatch(Group* group, const Dispatched& state, int r) {
  const HostPlan& want = state.plans[r];
  const jax_ep::PlanResults& plan = state.calls[r].plan;
  const auto expect = [&](const char* what, const void* address, const auto& values) {
    ExpectAt(address, what, group, r, values);
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
  const jax_ep::ForwardingResults& forwarding = state.calls[r].forwarding;
  expect("forwarding.token_ranks", forwarding.token_ranks, want.token_ranks);
  expect("forwarding.partial_sum_index", forwarding.partial_sum_index,
         want.domain_partial_sum_index);
  CheckRows("dispatch", group, r, state.shape, want, state.tokens, state.calls[r], 1);
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_TRANSFER_CALL_CHECKS_H_
