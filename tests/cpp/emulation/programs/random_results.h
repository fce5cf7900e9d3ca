// The results of a random call, and their comparison.
#ifndef JAX_EP_TESTS_CPP_EMULATION_PROGRAMS_RANDOM_RESULTS_H_
#define JAX_EP_TESTS_CPP_EMULATION_PROGRAMS_RANDOM_RESULTS_H_

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ffi/kernels/transfer/launch.h"
#include "ffi/runtime/status.h"
#include "tests/cpp/gpu/transfer/contract.h"
#include "tests/cpp/gpu/transfer/random_inputs.h"

namespace jax_ep::testing {

// Neither right nor safe.
inline constexpr uint8_t kUnwritten = 0x7b;

template <typename T>
std::vector<T> Unwritten(int64_t count) {
  std::vector<T> values(count);
  if (count > 0) std::memset(static_cast<void*>(values.data()), kUnwritten, count * sizeof(T));
  return values;
}

// The first difference between results and what is expected.
struct Comparison {
  std::string difference;

  template <typename T>
  void Equal(const char* what, const T* got, const std::vector<T>& want) {
    for (size_t i = 0; i < want.size() && difference.empty(); ++i) {
      if (std::memcmp(&got[i], &want[i], sizeof(T)) == 0) continue;
      difference =
          Concatenate(what, "[", i, "] of ", want.size(), " is ", +got[i], ", expected ", +want[i]);
    }
  }
  template <typename T>
  void All(const char* what, const std::vector<T>& got, T want) {
    Equal(what, got.data(), std::vector<T>(got.size(), want));
  }
  void AllNan(const char* what, const std::vector<float>& got) {
    for (float value : got) {
      if (!std::isnan(value)) return Add(what, " is not all NaN");
    }
  }
  void AllNan(const char* what, const harness::Bytes& got, ElementType type) {
    if (!harness::AllNan(got, type)) Add(what, " is not all NaN");
  }

 private:
  void Add(const char* what, const char* is) {
    if (difference.empty()) difference = Concatenate(what, is);
  }
};

// A rank's plan.
class PlanBuffers {
 public:
  void Forget(const harness::Routing& sizes) {
    const int64_t assignments = int64_t{sizes.tokens} * sizes.top_k;
    group_sizes_ = Unwritten<int32_t>(sizes.local());
    real_group_sizes_ = group_sizes_;
    row_offsets_ = Unwritten<int32_t>(sizes.local() + 1);
    row_source_ = Unwritten<int32_t>(int64_t{3} * sizes.rows);
    partial_sum_index_ = Unwritten<int32_t>(sizes.rows);
    kept_ = Unwritten<uint8_t>(assignments);
    destination_ = Unwritten<int32_t>(assignments);
    scalars_ = Unwritten<int32_t>(kNumScalars);
    token_ranks_ = Unwritten<uint32_t>(sizes.num_token_ranks());
    index_in_domain_ = Unwritten<int32_t>(sizes.domain_size == 0 ? 0 : sizes.rows);
  }

  PlanResults Results() {
    return {.group_sizes = group_sizes_.data(),
            .real_group_sizes = real_group_sizes_.data(),
            .row_offsets = row_offsets_.data(),
            .row_source = row_source_.data(),
            .partial_sum_index = partial_sum_index_.data(),
            .kept = reinterpret_cast<bool*>(kept_.data()),
            .destination = destination_.data(),
            .num_received = &scalars_[kReceived],
            .num_dropped = &scalars_[kDropped],
            .num_bad_ids = &scalars_[kBadIds],
            .status = &scalars_[kStatus]};
  }
  PlanOperands Operands() {
    const PlanResults plan = Results();
    return {plan.row_offsets, plan.row_source, plan.partial_sum_index, plan.destination,
            plan.status};
  }
  ForwardingResults Forwarding() { return {token_ranks_.data(), index_in_domain_.data()}; }
  ForwardingOperands ForwardingToRead() const {
    return {token_ranks_.data(), index_in_domain_.data()};
  }
  int status() const { return scalars_[kStatus]; }

  void Compare(Comparison& compare, const harness::HostPlan& want) const {
    compare.Equal("plan.group_sizes", group_sizes_.data(), want.group_sizes);
    compare.Equal("plan.real_group_sizes", real_group_sizes_.data(), want.real_group_sizes);
    compare.Equal("plan.row_offsets", row_offsets_.data(), want.row_offsets);
    compare.Equal("plan.row_source", row_source_.data(), want.row_source);
    compare.Equal("plan.partial_sum_index", partial_sum_index_.data(), want.partial_sum_index);
    compare.Equal("plan.kept", kept_.data(), want.kept);
    compare.Equal("plan.destination", destination_.data(), want.destination);
    compare.Equal("plan's scalars", scalars_.data(),
                  std::vector<int32_t>{want.num_received, want.num_dropped, want.num_bad_ids, 0});
    compare.Equal("forwarding.token_ranks", token_ranks_.data(), want.token_ranks);
    compare.Equal("forwarding.partial_sum_index", index_in_domain_.data(),
                  want.domain_partial_sum_index);
  }

  // Compares with the plan of a failed call: nothing is received, and the status says why.
  void CompareSafe(Comparison& compare) const {
    compare.All("plan.group_sizes", group_sizes_, 0);
    compare.All("plan.real_group_sizes", real_group_sizes_, 0);
    compare.All("plan.row_offsets", row_offsets_, 0);
    compare.All("plan.row_source", row_source_, -1);
    compare.All("plan.partial_sum_index", partial_sum_index_, -1);
    compare.All("plan.kept", kept_, uint8_t{0});
    compare.All("plan.destination", destination_, -1);
    compare.All("forwarding.token_ranks", token_ranks_, 0u);
    compare.All("forwarding.partial_sum_index", index_in_domain_, -1);
    const bool is_outcome = status() >= static_cast<int>(Outcome::kTimeout) &&
                            status() <= static_cast<int>(Outcome::kConcurrent);
    compare.Equal("plan's scalars", scalars_.data(),
                  std::vector<int32_t>{0, 0, 0, is_outcome ? status() : 1});
  }

 private:
  enum { kReceived, kDropped, kBadIds, kStatus, kNumScalars };

  std::vector<int32_t> group_sizes_, real_group_sizes_, row_offsets_, row_source_,
      partial_sum_index_, destination_, scalars_, index_in_domain_;
  std::vector<uint32_t> token_ranks_;
  std::vector<uint8_t> kept_;
};

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_PROGRAMS_RANDOM_RESULTS_H_
