// Runs one case: makes its operands, launches, compares.
#ifndef JAX_EP_TESTS_CPP_GPU_MATMUL_MATMUL_RUNNER_H_
#define JAX_EP_TESTS_CPP_GPU_MATMUL_MATMUL_RUNNER_H_

#include <algorithm>
#include <string>
#include <vector>

#include "ffi/kernels/matmul/grouped_matmul.h"
#include "ffi/kernels/matmul/launch.h"
#include "tests/cpp/gpu/guarded_buffer.h"
#include "tests/cpp/gpu/matmul/matmul_cases.h"

namespace harness {

struct Outcome {
  bool ok = true;
  double excess = 0;  // the worst error, relative to its tolerance
  double error = 0;   // the worst error, relative to the sum of absolute products
  std::string problem;
};

class Runner {
 public:
  explicit Runner(const Case& c) { Prepare(c); }

  void Prepare(const Case& c) {
    case_ = c;
    const Kind& kind = c.kind;
    const auto bytes = [](ElementType type) {
      return static_cast<size_t>(jax_ep::ElementBytes(type));
    };
    const auto offset = [&](ElementType type) { return c.misaligned ? bytes(type) : 0; };
    const int64_t groups = static_cast<int64_t>(c.sizes.size());
    const Rows rows(c.sizes, c.m);
    sizes_.Set(c.sizes);
    row_group_.Set(rows.row_group);
    begins_.Set(rows.begins);
    ends_.Set(rows.ends);
    counts_.Set(rows.counts);
    worst_.Reset(sizeof(Worst));

    const int64_t lhs_elements = c.m * c.k;
    lhs_.Reset(lhs_elements * bytes(kind.lhs), offset(kind.lhs));
    ForEach(lhs_elements, FillFunction{kind.lhs, 1, lhs_.data(), rows.end * c.k, nullptr, 1});
    const int64_t right_elements = kind.is_gradient ? c.m * c.n : groups * c.k * c.n;
    right_.Reset(right_elements * bytes(kind.right), offset(kind.right));
    ForEach(right_elements,
            kind.is_gradient
                ? FillFunction{kind.right, 2, right_.data(), rows.end * c.n, nullptr, 1}
                : FillFunction{kind.right, 2, right_.data(), right_elements, counts_.As<int32_t>(),
                               c.k * c.n});
    out_elements_ = kind.is_gradient ? groups * c.k * c.n : c.m * c.n;
    out_bytes_ = out_elements_ * bytes(kind.out);
    out_.Reset(out_bytes_, offset(kind.out));
    FillAccumulators();
  }

  // Other groups on the same operands; the capacity of rhs stays.
  void SetSizes(const std::vector<int32_t>& sizes) {
    case_.sizes = sizes;
    const Rows rows(sizes, case_.m);
    const auto set = [](GuardedBuffer& buffer, const std::vector<int32_t>& values) {
      Require(cudaMemcpy(buffer.data(), values.data(), values.size() * 4, cudaMemcpyHostToDevice),
              "cudaMemcpy");
    };
    set(sizes_, sizes);
    set(row_group_, rows.row_group);
    set(begins_, rows.begins);
    set(ends_, rows.ends);
  }

  // Poisons the result; one that accumulates begins with its accumulators again.
  void ClearOut() {
    Require(cudaMemset(out_.data(), 0xff, out_bytes_), "cudaMemset");
    FillAccumulators();
  }

  // `other_sizes`: on the device, instead of the case's.
  jax_ep::Status Launch(cudaStream_t stream = nullptr, const int32_t* other_sizes = nullptr) const {
    const Kind& kind = case_.kind;
    jax_ep::GroupedMatmulConfig config;
    config.transpose_rhs = kind.transpose;
    config.has_accumulator = kind.accumulates;
    config.zero_tail = case_.zero_tail;
    config.num_sms = case_.num_sms;
    jax_ep::GroupedMatmulSizes sizes;
    sizes.num_groups = static_cast<int64_t>(case_.sizes.size());
    sizes.num_rows = case_.m;
    sizes.contracted = case_.k;
    sizes.columns = case_.n;
    sizes.lhs_type = kind.lhs;
    // The names are the forward call's: the gradient's result has rhs's type.
    sizes.rhs_type = kind.is_gradient ? kind.out : kind.right;
    sizes.result_type = kind.is_gradient ? kind.right : kind.out;
    const int32_t* const group_sizes = other_sizes != nullptr ? other_sizes : sizes_.As<int32_t>();
    return (kind.is_gradient ? jax_ep::LaunchGroupedMatmulRhsGradient
                             : jax_ep::LaunchGroupedMatmul)(config, sizes, lhs_.data(),
                                                            right_.data(), group_sizes, out_.data(),
                                                            case_.tile_counter, stream);
  }

  Outcome Check() {
    Require(cudaDeviceSynchronize(), "the kernel");
    const Worst none = {0, 0};
    Require(cudaMemcpy(worst_.data(), &none, sizeof none, cudaMemcpyHostToDevice), "cudaMemcpy");
    const Kind& kind = case_.kind;
    const int64_t samples = out_elements_ == 0 ? 0 : case_.num_samples;
    ForEach(
        samples != 0 ? samples : out_elements_,
        CheckFunction{kind.is_gradient, kind.transpose, case_.zero_tail, kind.accumulates, kind.lhs,
                      kind.right, kind.out, case_.k, case_.n, lhs_.data(), right_.data(),
                      out_.data(), row_group_.As<int32_t>(), begins_.As<int32_t>(),
                      ends_.As<int32_t>(), out_elements_, samples, worst_.As<Worst>()});
    Worst worst;
    Require(cudaMemcpy(&worst, worst_.data(), sizeof worst, cudaMemcpyDeviceToHost), "cudaMemcpy");
    Outcome outcome;
    outcome.excess = FromBits(static_cast<uint32_t>(worst.excess >> 32));
    outcome.error = FromBits(static_cast<uint32_t>(worst.error >> 32));
    if (outcome.excess > 1) {
      outcome.problem = "element " + std::to_string(static_cast<uint32_t>(worst.excess)) +
                        " is off by " + std::to_string(outcome.excess) + " tolerances";
    }
    if (!out_.GuardsAreIntact()) outcome.problem += " written outside of the result";
    outcome.ok = outcome.problem.empty();
    return outcome;
  }

  Outcome Run() {
    const jax_ep::Status status = Launch();
    if (!status.ok()) return {.ok = false, .problem = status.message};
    return Check();
  }

  std::vector<uint8_t> Result() const {
    Require(cudaDeviceSynchronize(), "the kernel");
    return out_.Bytes();
  }
  void SetNumSms(int64_t num_sms) { case_.num_sms = num_sms; }

 private:
  void FillAccumulators() {
    if (!case_.kind.accumulates) return;
    ForEach(out_elements_, FillFunction{kF32, kAccumulatorSeed, out_.data(), out_elements_});
  }

  Case case_;
  int64_t out_elements_ = 0;
  size_t out_bytes_ = 0;
  GuardedBuffer sizes_, row_group_, begins_, ends_, counts_, worst_, lhs_, right_, out_;
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MATMUL_MATMUL_RUNNER_H_
