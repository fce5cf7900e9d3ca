// Runs one launch of a matmul with an activation, or of its gradient: makes its operands, launches,
// compares with loops on the host.
#ifndef JAX_EP_TESTS_CPP_GPU_MATMUL_GROUPED_MATMUL_ACTIVATION_RUNNER_H_
#define JAX_EP_TESTS_CPP_GPU_MATMUL_GROUPED_MATMUL_ACTIVATION_RUNNER_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "ffi/kernels/matmul/grouped_matmul_activation.h"
#include "tests/cpp/gpu/guarded_buffer.h"
#include "tests/cpp/gpu/matmul/activation_bounds.h"
#include "tests/cpp/gpu/matmul/grouped_matmul_activation_cases.h"

namespace harness {

// The buffers of one kind of launch, and their contents.
class FusedRunner {
 public:
  explicit FusedRunner(const FusedKind& kind)
      : kind_(kind), is_gated_(jax_ep::IsGated(kind.activation)) {}

  Tally Run(const FusedCase& c) {
    case_ = c;
    rows_ = Rows(c.pattern.sizes, c.m);
    num_pre_ = is_gated_ ? 2 * c.f : c.f;
    num_sums_ = kind_.is_gradient ? c.f : num_pre_;
    num_dots_ = kind_.is_gradient ? (c.f + kColumnsPerDot - 1) / kColumnsPerDot : 0;
    Prepare();
    const jax_ep::Status status = Launch();
    Tally tally;
    if (!status.ok()) {
      tally.Fail(status.message);
      return tally;
    }
    Require(cudaDeviceSynchronize(), "the kernel");
    out_bits_ = out_.Bytes();
    pre_bits_ = pre_.Bytes();
    gradient_bits_ = gradient_.Bytes();
    dot_bits_ = dots_.Bytes();
    tally = ForEachRow(rows_.end, [&](int64_t row, Tally* of_row) {
      kind_.is_gradient ? CheckGradientRow(row, of_row) : CheckForwardRow(row, of_row);
    });
    CheckRest(&tally);
    return tally;
  }

 private:
  static constexpr int64_t kColumnsPerDot = 128;

  // NaN wherever nothing may be read, with other bits than the 0xff of unwritten results: the bits
  // in a result tell where they come from.
  void Prepare() {
    const int64_t m = case_.m, k = case_.k, f = case_.f;
    const int64_t groups = static_cast<int64_t>(case_.pattern.sizes.size());
    const auto random = [&](int stream, int64_t i) {
      return RandomNumber(case_.seed * 8 + stream, i);
    };
    const auto draw = [&](int64_t count, const auto& number) {
      std::vector<uint16_t> bits(count);
      for (int64_t i = 0; i < count; ++i) {
        bits[i] = ToBits(kind_.type, number(i));
      }
      return bits;
    };
    const auto numbers = [&](const std::vector<uint16_t>& bits) {
      std::vector<float> values;
      for (size_t i = 0; i < bits.size(); ++i) values.push_back(Element(kind_.type, &bits[i], 0));
      return values;
    };
    const auto lhs = draw(m * k, [&](int64_t i) { return i / k < rows_.end ? random(1, i) : NAN; });
    // Pre-activations of about 2, where activations are neither linear nor constant.
    const float scale = 6 / std::sqrt(static_cast<float>(k));
    const int64_t matrix = k * num_sums_;
    const auto rhs = draw(groups * matrix, [&](int64_t i) {
      return rows_.counts[i / matrix] > 0 ? scale * random(2, i) : NAN;
    });
    // Activations saturate at some of these.
    const auto pre = draw(kind_.is_gradient ? m * num_pre_ : 0, [&](int64_t i) {
      return i / num_pre_ < rows_.end ? random(3, i) * (i % 8 == 5 ? 16 : 4) : NAN;
    });
    bias_values_.assign(case_.has_bias ? groups * num_pre_ : 0, NAN);
    for (size_t i = 0; i < bias_values_.size(); ++i) {
      if (rows_.counts[i / num_pre_] > 0) bias_values_[i] = random(4, i);
    }
    weight_values_.assign(case_.has_weights ? m : 0, NAN);
    for (size_t i = 0; i < weight_values_.size(); ++i) {
      if (static_cast<int64_t>(i) < rows_.end) weight_values_[i] = 2 * random(5, i);
    }

    lhs_values_ = numbers(lhs);
    rhs_values_ = numbers(rhs);
    if (kind_.is_gradient) {  // stored as [f, k]; the loops go along f
      const std::vector<float> stored = rhs_values_;
      for (int64_t i = 0; i < groups * matrix; ++i) {
        rhs_values_[(i / matrix * k + i % k) * f + i / k % f] = stored[i];
      }
    }

    sizes_.Set(case_.pattern.sizes);
    lhs_.Set(lhs);
    rhs_.Set(rhs);
    bias_.Set(bias_values_);
    weights_.Set(weight_values_);
    pre_.Set(pre);
    given_pre_ = pre_.Bytes();
    if (case_.keeps) pre_.Reset(m * num_pre_ * 2);
    out_.Reset(m * f * 2);
    gradient_.Reset(kind_.is_gradient ? m * num_pre_ * 2 : 0);
    dots_.Reset(m * num_dots_ * 4);
  }

  jax_ep::Status Launch() const {
    const jax_ep::GroupedMatmulActivationConfig config = {.activation = kind_.activation,
                                                          .has_bias = case_.has_bias,
                                                          .has_row_weights = case_.has_weights,
                                                          .keep_pre_activation = case_.keeps,
                                                          .num_sms = case_.num_sms};
    const jax_ep::GroupedMatmulSizes sizes = {static_cast<int64_t>(case_.pattern.sizes.size()),
                                              case_.m,
                                              case_.k,
                                              case_.f,
                                              kind_.type,
                                              kind_.type,
                                              kind_.type};
    const auto* group_sizes = sizes_.As<int32_t>();
    const auto* weights = case_.has_weights ? weights_.As<float>() : nullptr;
    if (kind_.is_gradient) {
      return jax_ep::LaunchGroupedMatmulActivationGradient(
          config, sizes,
          {lhs_.data(), rhs_.data(), group_sizes, pre_.data(), weights, gradient_.data(),
           out_.data(), dots_.As<float>()},
          case_.tile_counter, nullptr);
    }
    const auto* bias = case_.has_bias ? bias_.As<float>() : nullptr;
    return jax_ep::LaunchGroupedMatmulActivation(
        config, sizes,
        {lhs_.data(), rhs_.data(), group_sizes, bias, weights, out_.data(),
         case_.keeps ? pre_.data() : nullptr},
        case_.tile_counter, nullptr);
  }

  // Bounds of a row's accumulators, with the bias as one more term.
  std::vector<Interval> Sums(int64_t row) const {
    const int64_t group = rows_.row_group[row];
    std::vector<double> sums(num_sums_), magnitudes(num_sums_);
    const auto add = [&](double left, const float* right) {
      for (int64_t n = 0; n < num_sums_; ++n) {
        const double product = left * right[n];
        sums[n] += product;
        magnitudes[n] += std::abs(product);
      }
    };
    for (int64_t k = 0; k < case_.k; ++k) {
      add(lhs_values_[row * case_.k + k], &rhs_values_[(group * case_.k + k) * num_sums_]);
    }
    if (case_.has_bias) add(1, &bias_values_[group * num_sums_]);
    std::vector<Interval> bounds;
    const double error = SumError(kind_.type, case_.k);
    for (int64_t n = 0; n < num_sums_; ++n) {
      bounds.push_back(Around(sums[n], error * magnitudes[n]));
    }
    return bounds;
  }

  Interval Weight(int64_t row) const {
    return Around(case_.has_weights ? weight_values_[row] : 1, 0);
  }
  Interval Round(const Interval& exact) const { return Rounded(kind_.type, exact); }
  double At(const std::vector<uint8_t>& bits, int64_t i) const {
    return Element(kind_.type, bits.data(), i);
  }

  // The activation reads the rounded pre-activation: the one that was kept, otherwise the bounds,
  // which are mostly one number.
  void CheckForwardRow(int64_t row, Tally* tally) const {
    std::vector<Interval> pre = Sums(row);
    const bool rounds = kind_.activation != Activation::kNone;
    for (int64_t n = 0; rounds && n < num_pre_; ++n) {
      pre[n] = Round(pre[n]);
      if (!case_.keeps) continue;
      const double kept = At(pre_bits_, row * num_pre_ + n);
      tally->Expect("pre_activation", row, n, kept, pre[n]);
      pre[n] = Around(kept, 0);
    }
    for (int64_t n = 0; n < case_.f; ++n) {
      Interval value = rounds ? ValueOn(kind_.activation, pre[n]) : pre[n];
      if (is_gated_) value = Times(value, pre[case_.f + n]);
      if (case_.has_weights) value = Times(Weight(row), value);
      tally->Expect("out", row, n, At(out_bits_, row * case_.f + n), Round(value));
    }
  }

  // Accumulators are rounded before they are used; no result has them.
  void CheckGradientRow(int64_t row, Tally* tally) const {
    const std::vector<Interval> sums = Sums(row);
    const Interval weight = Weight(row);
    std::vector<Interval> dots(num_dots_, Interval{0, 0});
    std::vector<double> magnitudes(num_dots_);
    for (int64_t n = 0; n < case_.f; ++n) {
      const Interval d = Round(sums[n]);
      const int64_t at = row * num_pre_ + n;
      const ActivationBounds bounds = BoundsAt(kind_.activation, At(given_pre_, at));
      const Interval up = Around(is_gated_ ? At(given_pre_, at + case_.f) : 1, 0);
      const Interval hidden = Times(bounds.value, up);
      const Interval weighted = Times(weight, d);
      tally->Expect("hidden", row, n, At(out_bits_, row * case_.f + n),
                    Round(Times(weight, hidden)));
      tally->Expect("gradient", row, n, At(gradient_bits_, at),
                    Round(Times(Times(weighted, up), bounds.derivative)));
      if (is_gated_) {
        tally->Expect("gradient", row, n + case_.f, At(gradient_bits_, at + case_.f),
                      Round(Times(weighted, bounds.value)));
      }
      const Interval term = Times(hidden, d);  // neither has the weight
      Interval& dot = dots[n / kColumnsPerDot];
      dot = {dot.low + term.low, dot.high + term.high};
      magnitudes[n / kColumnsPerDot] += term.Most();
    }
    // In both kernels a term goes through fewer than 16 additions.
    for (int64_t i = 0; i < num_dots_; ++i) {
      const double got = Element(kF32, dot_bits_.data(), row * num_dots_ + i);
      tally->Expect("row_dots", row, i, got, dots[i].Widened(16 * kRounding * magnitudes[i]));
    }
  }

  // Rows outside of all groups, and all inputs, are unchanged.
  void CheckRest(Tally* tally) const {
    const auto expect_tail = [&](const char* what, const std::vector<uint8_t>& bytes) {
      const auto end = bytes.begin() + bytes.size() / case_.m * rows_.end;
      if (!std::all_of(end, bytes.end(), [](uint8_t byte) { return byte == 0xff; })) {
        tally->Fail(std::string(what) + " is written past the last group");
      }
    };
    expect_tail("out", out_bits_);
    expect_tail("gradient", gradient_bits_);
    expect_tail("row_dots", dot_bits_);
    if (case_.keeps) expect_tail("pre_activation", pre_bits_);
    if (!case_.keeps && pre_bits_ != given_pre_) tally->Fail("pre_activation has changed");
    for (const GuardedBuffer* buffer : {&out_, &pre_, &gradient_, &dots_}) {
      if (!buffer->GuardsAreIntact()) tally->Fail("written outside of a result");
    }
  }

  const FusedKind kind_;
  const bool is_gated_;
  FusedCase case_ = {};
  Rows rows_{{}, 0};
  int64_t num_pre_ = 0;   // columns
  int64_t num_sums_ = 0;  // columns of rhs
  int64_t num_dots_ = 0;
  std::vector<float> lhs_values_, rhs_values_, bias_values_, weight_values_;
  std::vector<uint8_t> given_pre_, out_bits_, pre_bits_, gradient_bits_, dot_bits_;
  GuardedBuffer sizes_, lhs_, rhs_, bias_, weights_, pre_, out_, gradient_, dots_;
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MATMUL_GROUPED_MATMUL_ACTIVATION_RUNNER_H_
