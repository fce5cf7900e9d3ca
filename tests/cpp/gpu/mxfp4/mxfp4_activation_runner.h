// Runs one case of the matmul with MXFP4 weights and an activation: makes its operands, launches,
// compares with float64.
#ifndef JAX_EP_TESTS_CPP_GPU_MXFP4_MXFP4_ACTIVATION_RUNNER_H_
#define JAX_EP_TESTS_CPP_GPU_MXFP4_MXFP4_ACTIVATION_RUNNER_H_

#include <cmath>
#include <string>
#include <vector>

#include "ffi/kernels/matmul/grouped_matmul_mxfp4.h"
#include "tests/cpp/gpu/guarded_buffer.h"
#include "tests/cpp/gpu/matmul/matmul_cases.h"
#include "tests/cpp/gpu/mxfp4/mxfp4_runner.h"

namespace harness {

using jax_ep::Activation;

struct MxFp4ActivationKind {
  const char* name;
  Activation activation;
  float limit = 0;
  float alpha = 0;

  HARNESS_FUNCTION bool IsGated() const { return activation != Activation::kNone; }
};
inline constexpr MxFp4ActivationKind kMxFp4Kinds[] = {
    {"none", Activation::kNone},
    {"swiglu", Activation::kSwiglu},
    {"geglu", Activation::kGeglu},
    {"clamped swiglu", Activation::kSwiglu, 7, 1.702f},
    {"narrowly clamped swiglu", Activation::kSwiglu, 0.75f, 0.5f}};

struct MxFp4ActivationCase {
  MxFp4ActivationKind kind;
  int64_t m, k, f;
  std::vector<int32_t> sizes;
  bool has_bias = false;
  bool has_weights = false;
  bool keeps = false;  // the pre-activation
  int64_t num_sms = 0;
  int32_t tile_counter = 0;
  int64_t num_samples = 0;  // 0: every element is checked
  uint64_t seed = 0;
  int first_scale = 124;
  int num_scales = 2;
};

// Checks one element of the result, and its pre-activation.
struct MxFp4ActivationCheckFunction {
  MxFp4ActivationKind kind;
  int64_t k, f;
  const uint16_t* lhs;
  const uint16_t* rhs;       // dequantized
  const float* bias;         // or null
  const float* row_weights;  // or null
  const uint16_t* out;
  const uint16_t* pre_activation;  // or null
  const int32_t* row_group;
  int64_t num_elements;
  int64_t num_samples;
  Worst* worst;

  __device__ void operator()(int64_t item) const {
    const int64_t i = CheckedElement(item, num_samples, num_elements);
    worst->Keep(i, IsRight(i / f, i % f) ? 0 : 1e30, 0);
  }

 private:
  struct Range {
    double low, high;
  };

  __device__ bool IsRight(int64_t row, int64_t column) const {
    const uint16_t got = out[row * f + column];
    if (row_group[row] < 0) return got == 0xffff && (!kind.IsGated() || TailIsKept(row, column));
    const double weight = row_weights == nullptr ? 1 : row_weights[row];
    Range first, second = {1, 1};
    bool ok = PreActivation(row, column, &first);
    if (kind.IsGated()) ok = PreActivation(row, column + f, &second) && ok;
    if (!ok) return false;
    Range all = {INFINITY, -INFINITY};
    bool is_nan = false;
    for (int ends = 0; ends < 4; ++ends) {
      const Range value =
          Value(ends % 2 ? first.high : first.low, ends / 2 ? second.high : second.low, weight);
      is_nan = is_nan || isnan(value.low) || isnan(value.high);
      all = {fmin(all.low, value.low), fmax(all.high, value.high)};
    }
    const double result = FromBFloat16(got);
    if (is_nan) return isnan(result);
    return result >= RoundTo(kBF16, all.low) && result <= RoundTo(kBF16, all.high);
  }

  __device__ bool TailIsKept(int64_t row, int64_t column) const {
    return pre_activation == nullptr || (pre_activation[row * 2 * f + column] == 0xffff &&
                                         pre_activation[row * 2 * f + f + column] == 0xffff);
  }

  // Returns whether the kept pre-activation is right. `range`: the kept one or, if there is none,
  // what it may be; without an activation it is not rounded.
  __device__ bool PreActivation(int64_t row, int64_t column, Range* range) const {
    const int64_t columns = kind.IsGated() ? 2 * f : f;
    const int64_t matrix_column = row_group[row] * columns + column;
    double sum = 0, magnitude = 0;
    const auto add = [&](double product) {
      sum += product;
      magnitude += fabs(product);
    };
    for (int64_t at = 0; at < k; ++at) {
      add(double{FromBFloat16(lhs[row * k + at])} * FromBFloat16(rhs[matrix_column * k + at]));
    }
    if (bias != nullptr) add(bias[matrix_column]);
    const double error = SumError(kBF16, k + 1) * magnitude;
    *range = {sum - error, sum + error};
    if (!kind.IsGated()) return true;
    *range = {RoundTo(kBF16, range->low), RoundTo(kBF16, range->high)};
    if (pre_activation == nullptr) return true;
    const double kept = FromBFloat16(pre_activation[row * columns + column]);
    const bool ok = isnan(sum) ? isnan(kept) : kept >= range->low && kept <= range->high;
    *range = {kept, kept};
    return ok;
  }

  // Returns the result for a pre-activation, with the errors of float32: activation_bounds.h counts
  // those of x * sigmoid(a), and a product and the sum with 1 have one each.
  __device__ Range Value(double first, double second, double weight) const {
    constexpr double kUnit = 0x1p-24;
    if (!kind.IsGated()) return Around(first * weight, 2 * kUnit * fabs(first * weight));
    const bool has_limit = kind.limit > 0;
    const double gate = has_limit && first > kind.limit ? kind.limit : first;
    double up = second;
    if (has_limit) {
      if (up > kind.limit) up = kind.limit;
      if (up < -kind.limit) up = -kind.limit;
      up += 1;
    }
    const double a = kind.activation == Activation::kGeglu
                         ? 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
                         : gate * (has_limit ? kind.alpha : 1);
    const double sigmoid = 1 / (1 + exp(-a));
    const double rest = 1 / (1 + exp(a));
    const double relative = (rest * (6 + 10 * fabs(a)) + 8) * kUnit;
    const double value = gate * sigmoid * up * weight;
    // Numbers below 2^-126 may be zeros. Adding 1 rounds by up to a unit of 1.
    const double flushed = fabs(gate) * 0x1p-126 * fabs(up * weight);
    const double of_up = has_limit ? fabs(gate * sigmoid * weight) * 2 * kUnit : 0;
    return Around(value, fabs(value) * relative + flushed + of_up + 0x1p-126);
  }

  __device__ static Range Around(double value, double error) {
    return {value - error, value + error};
  }
};

class MxFp4ActivationRunner {
 public:
  explicit MxFp4ActivationRunner(const MxFp4ActivationCase& c) { Prepare(c); }

  void Prepare(const MxFp4ActivationCase& c) {
    case_ = c;
    columns_ = c.kind.IsGated() ? 2 * c.f : c.f;
    const int64_t groups = static_cast<int64_t>(c.sizes.size());
    const int64_t matrix = columns_ * c.k;
    const Rows rows(c.sizes, c.m);
    sizes_.Set(c.sizes);
    row_group_.Set(rows.row_group);
    counts_.Set(rows.counts);
    worst_.Reset(sizeof(Worst));
    lhs_.Reset(c.m * c.k * 2);
    values_.Reset(groups * matrix / 2);
    scales_.Reset(groups * matrix / kMxFp4Values);
    bias_.Reset(groups * columns_ * sizeof(float));
    weights_.Reset(c.m * sizeof(float));
    const int32_t* const counts = counts_.As<int32_t>();
    ForEach(c.m * c.k, FillFunction{kBF16, c.seed + 1, lhs_.data(), rows.end * c.k});
    ForEach(groups * matrix / 2,
            MxFp4FillFunction{c.seed + 2, 0, 256, values_.data(), counts, matrix / 2});
    ForEach(groups * matrix / kMxFp4Values,
            MxFp4FillFunction{c.seed + 3, c.first_scale, c.num_scales, scales_.data(), counts,
                              matrix / kMxFp4Values});
    ForEach(groups * columns_,
            FillFunction{kF32, c.seed + 4, bias_.data(), groups * columns_, counts, columns_});
    ForEach(c.m, FillFunction{kF32, c.seed + 5, weights_.data(), rows.end});
    out_.Reset(c.m * c.f * 2);
    pre_activation_.Reset(c.keeps ? c.m * columns_ * 2 : 16);
  }

  jax_ep::Status Launch(cudaStream_t stream = nullptr, const int32_t* sizes = nullptr) const {
    const jax_ep::MxFp4Matmul call = {
        .lhs = lhs_.data(),
        .rhs = values_.data(),
        .rhs_scales = scales_.data(),
        .group_sizes = sizes != nullptr ? sizes : sizes_.As<int32_t>(),
        .out = out_.data(),
        .zero_tail = false,
        .num_sms = case_.num_sms};
    const jax_ep::MxFp4Activation activation = {
        .activation = case_.kind.activation,
        .limit = case_.kind.limit,
        .alpha = case_.kind.alpha,
        .bias = Bias(),
        .row_weights = RowWeights(),
        .pre_activation = case_.keeps ? pre_activation_.data() : nullptr};
    jax_ep::GroupedMatmulSizes shape;
    shape.num_groups = static_cast<int64_t>(case_.sizes.size());
    shape.num_rows = case_.m;
    shape.contracted = case_.k;
    shape.columns = case_.f;
    shape.lhs_type = kBF16;
    return jax_ep::LaunchGroupedMatmulMxFp4Activation(call, activation, shape, case_.tile_counter,
                                                      stream);
  }

  // Returns what is wrong, or nothing.
  std::string Run() {
    if (const jax_ep::Status status = Launch(); !status.ok()) return status.message;
    Require(cudaDeviceSynchronize(), "the kernel");
    const Worst none = {0, 0};
    Require(cudaMemcpy(worst_.data(), &none, sizeof none, cudaMemcpyHostToDevice), "cudaMemcpy");
    const int64_t weights = static_cast<int64_t>(case_.sizes.size()) * columns_ * case_.k;
    dequantized_.Reset(weights * 2);
    ForEach(weights,
            MxFp4DequantizeFunction{values_.data(), scales_.data(), dequantized_.As<uint16_t>()});
    const int64_t elements = case_.m * case_.f;
    const int64_t samples = elements == 0 ? 0 : case_.num_samples;
    ForEach(samples != 0 ? samples : elements,
            MxFp4ActivationCheckFunction{
                case_.kind, case_.k, case_.f, lhs_.As<uint16_t>(), dequantized_.As<uint16_t>(),
                Bias(), RowWeights(), out_.As<uint16_t>(),
                case_.keeps ? pre_activation_.As<uint16_t>() : nullptr, row_group_.As<int32_t>(),
                elements, samples, worst_.As<Worst>()});
    Worst worst;
    Require(cudaMemcpy(&worst, worst_.data(), sizeof worst, cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (!out_.GuardsAreIntact() || !pre_activation_.GuardsAreIntact()) {
      return "written outside of the results";
    }
    if (worst.excess >> 32 == 0) return "";
    const int64_t element = static_cast<uint32_t>(worst.excess);
    return "row " + std::to_string(element / case_.f) + " column " +
           std::to_string(element % case_.f) + " is wrong";
  }

  std::vector<uint8_t> Result() const {
    Require(cudaDeviceSynchronize(), "the kernel");
    return out_.Bytes();
  }
  void SetNumSms(int64_t num_sms) { case_.num_sms = num_sms; }

 private:
  const float* Bias() const { return case_.has_bias ? bias_.As<float>() : nullptr; }
  const float* RowWeights() const { return case_.has_weights ? weights_.As<float>() : nullptr; }

  MxFp4ActivationCase case_;
  int64_t columns_ = 0;  // a matrix has
  GuardedBuffer sizes_, row_group_, counts_, worst_, lhs_, values_, scales_, dequantized_;
  GuardedBuffer bias_, weights_, out_, pre_activation_;
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MXFP4_MXFP4_ACTIVATION_RUNNER_H_
