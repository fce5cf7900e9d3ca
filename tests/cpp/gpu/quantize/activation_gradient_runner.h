// Calls of the kernel that quantizes gradients of gated activations, beside the same in four steps:
// gradients in bfloat16, which are compared with float64, and the kernels that quantize them.
#ifndef JAX_EP_TESTS_CPP_GPU_QUANTIZE_ACTIVATION_GRADIENT_RUNNER_H_
#define JAX_EP_TESTS_CPP_GPU_QUANTIZE_ACTIVATION_GRADIENT_RUNNER_H_

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "ffi/device/matmul/activation.cuh"
#include "ffi/kernels/matmul/activation_function.h"
#include "ffi/kernels/quantize/quantize_activation_gradient.h"
#include "ffi/kernels/quantize/quantize_transposed.h"
#include "tests/cpp/gpu/guarded_buffer.h"
#include "tests/cpp/gpu/matmul/matmul_check.h"
#include "tests/cpp/gpu/quantize/quantize_inputs.h"
#include "tests/cpp/gpu/quantize/row_blocks.h"

namespace harness {

using jax_ep::Activation;

struct ActivationCase {
  Activation activation = Activation::kSwiglu;
  bool has_row_weights = true;
  bool power_of_two_scales = false;
  int64_t rows, columns;
  std::vector<int32_t> sizes;

  std::string Name() const {
    char text[128];
    std::snprintf(text, sizeof text, "%s%s%s %d x %d in %d",
                  activation == Activation::kSwiglu ? "swiglu" : "geglu",
                  has_row_weights ? " weights" : "", power_of_two_scales ? " powers" : "",
                  int(rows), int(columns), int(sizes.size()));
    return text;
  }
};

// The operands of a case. Rows past the last group are NaN.
struct ActivationOperands {
  GuardedBuffer gradient, pre_activation, row_weights;

  void Reset(const ActivationCase& c, int64_t end, uint64_t seed) {
    gradient.Reset(2 * c.rows * c.columns);
    pre_activation.Reset(4 * c.rows * c.columns);
    row_weights.Reset(4 * c.rows);
    ForEach(end * c.columns, FillFunction{kBF16, seed, gradient.data(), end * c.columns});
    ForEach(2 * end * c.columns,
            FillFunction{kBF16, seed + 1, pre_activation.data(), 2 * end * c.columns});
    ForEach(end, FillFunction{kF32, seed + 2, row_weights.data(), end});
  }
};

struct ActivationResults {
  GuardedBuffer row_values, row_scales, values, scales, activation_values, activation_scales, dots;

  void Reset(const ActivationCase& c, const RowBlocks& blocks) {
    row_values.Reset(2 * c.rows * c.columns);
    row_scales.Reset(c.rows * (2 * c.columns / 128) * 4);
    values.Reset(blocks.capacity() * 2 * c.columns * 128);
    scales.Reset(blocks.capacity() * (2 * c.columns / 128) * 4);
    activation_values.Reset(blocks.capacity() * c.columns * 128);
    activation_scales.Reset(blocks.capacity() * c.columns * 4);
    dots.Reset(c.rows * (c.columns / 128) * 4);
  }

  std::vector<const GuardedBuffer*> Quantized() const {
    return {&row_values, &row_scales, &values, &scales, &activation_values, &activation_scales};
  }
};

inline jax_ep::QuantizeActivationGradient ActivationCall(
    const ActivationCase& c, const ActivationOperands& operands, const GuardedBuffer& first_rows,
    const GuardedBuffer& num_rows, int64_t row_blocks, const ActivationResults& results) {
  const jax_ep::ScaleOptions scale = {1e-4f, c.power_of_two_scales};
  return {.activation = c.activation,
          .num_rows = c.rows,
          .columns = c.columns,
          .row_blocks = row_blocks,
          .of_activations = scale,
          .of_gradient = {1e-30f, c.power_of_two_scales},
          .activations_gradient = operands.gradient.data(),
          .pre_activation = operands.pre_activation.data(),
          .row_weights = c.has_row_weights ? operands.row_weights.As<float>() : nullptr,
          .first_rows = first_rows.As<int32_t>(),
          .block_rows = num_rows.As<int32_t>(),
          .row_values = results.row_values.data(),
          .row_scales = results.row_scales.As<float>(),
          .values = results.values.data(),
          .scales = results.scales.As<float>(),
          .activation_values = results.activation_values.data(),
          .activation_scales = results.activation_scales.As<float>(),
          .row_dots = results.dots.As<float>()};
}

// Gradients in bfloat16, element by element, as the kernel rounds them.
struct GradientFunction {
  jax_ep::ActivationFunction f;
  jax_ep::QuantizeActivationGradient call;
  uint16_t* activations;  // [rows, F]
  uint16_t* gradient;     // [rows, 2F]
  unsigned long long* errors;

  __device__ void CheckValue(uint16_t bits, double expected, double slack) const {
    const double error = fabs(double{FromBFloat16(bits)} - expected);
    if (!(error <= 0x1.02p-8 * fabs(expected) + slack)) MaxInto(errors, 1);
  }

  __device__ void operator()(int64_t i) const {
    const int64_t row = i / call.columns, gate_at = 2 * row * call.columns + i % call.columns;
    const auto* const pre = static_cast<const uint16_t*>(call.pre_activation);
    const float d = FromBFloat16(static_cast<const uint16_t*>(call.activations_gradient)[i]);
    const float g = FromBFloat16(pre[gate_at]), u = FromBFloat16(pre[gate_at + call.columns]);
    const float weight = call.row_weights == nullptr ? 1.0f : call.row_weights[row];
    const jax_ep::ActivationResult gate = jax_ep::ActivateFast<true>(f, g);
    activations[i] = ToBFloat16(weight * (gate.value * u));
    const float weighted = weight * d;
    gradient[gate_at] = ToBFloat16(weighted * u * gate.derivative);
    gradient[gate_at + call.columns] = ToBFloat16(weighted * gate.value);
    // In float64, from the formulas.
    const double linear = f.linear, cubic = f.cubic, x = g;
    const double sigmoid = 1 / (1 + exp(-(linear + cubic * x * x) * x));
    const double slope = sigmoid * (1 - sigmoid) * (linear + 3 * cubic * x * x);
    CheckValue(activations[i], double{weight} * x * sigmoid * u, 1e-30);
    CheckValue(gradient[gate_at], double{weight} * d * u * (sigmoid + x * slope),
               0x1p-18 * fabs(double{weight} * d * u));
    CheckValue(gradient[gate_at + call.columns], double{weight} * d * x * sigmoid, 1e-30);
  }
};

// Compares dot products with sums in float64.
struct DotFunction {
  GradientFunction of;

  __device__ void operator()(int64_t i) const {
    const int64_t blocks = of.call.columns / 128, row = i / blocks;
    const auto* const pre = static_cast<const uint16_t*>(of.call.pre_activation);
    double sum = 0, magnitudes = 0;
    for (int64_t column = i % blocks * 128; column < (i % blocks + 1) * 128; ++column) {
      const double x = FromBFloat16(pre[2 * row * of.call.columns + column]);
      const double u = FromBFloat16(pre[(2 * row + 1) * of.call.columns + column]);
      const double d = FromBFloat16(static_cast<const uint16_t*>(
          of.call.activations_gradient)[row * of.call.columns + column]);
      const double sigmoid = 1 / (1 + exp(-(of.f.linear + of.f.cubic * x * x) * x));
      sum += x * sigmoid * u * d;
      magnitudes += fabs(x * sigmoid * u * d);
    }
    if (!(fabs(of.call.row_dots[i] - sum) <= 0x1p-19 * magnitudes)) MaxInto(of.errors + 1, 1);
  }
};

class ActivationRunner {
 public:
  explicit ActivationRunner(const ActivationCase& c) : c_(c), blocks_(c.sizes, c.rows) {
    const int64_t last = blocks_.used - 1;
    end_ = blocks_.used > 0 ? blocks_.first_rows[last] + blocks_.num_rows[last] : 0;
    operands_.Reset(c, end_, 5);
    first_rows_.Set(blocks_.first_rows);
    num_rows_.Set(blocks_.num_rows);
    fused_.Reset(c, blocks_);
    steps_.Reset(c, blocks_);
  }

  // Returns what is wrong with the results, or "".
  std::string Run() {
    const jax_ep::Status status = jax_ep::LaunchQuantizeActivationGradient(CallTo(fused_), nullptr);
    if (!status.ok()) return status.message;
    Require(cudaDeviceSynchronize(), "the kernel");
    for (const GuardedBuffer* buffer : fused_.Quantized()) {
      if (!buffer->GuardsAreIntact()) return "a store out of bounds";
    }
    if (!fused_.dots.GuardsAreIntact()) return "a dot product out of bounds";
    if (std::string problem = InSteps(); !problem.empty()) return problem;
    const char* const names[] = {"row values", "row scales",        "values",
                                 "scales",     "activation values", "activation scales"};
    for (size_t i = 0; i < std::size(names); ++i) {
      if (fused_.Quantized()[i]->Bytes() != steps_.Quantized()[i]->Bytes()) {
        return std::string("the bits of ") + names[i] + " differ from those of separate kernels";
      }
    }
    return "";
  }

 private:
  jax_ep::QuantizeActivationGradient CallTo(const ActivationResults& results) const {
    return ActivationCall(c_, operands_, first_rows_, num_rows_, blocks_.capacity(), results);
  }

  // Computes gradients and checks them, then quantizes them.
  std::string InSteps() {
    GuardedBuffer activations, gradient, errors;
    activations.Reset(2 * c_.rows * c_.columns);
    gradient.Reset(4 * c_.rows * c_.columns);
    errors.Set(std::vector<unsigned long long>(2));
    const GradientFunction function = {jax_ep::MakeActivationFunction(c_.activation),
                                       CallTo(fused_), activations.As<uint16_t>(),
                                       gradient.As<uint16_t>(), errors.As<unsigned long long>()};
    ForEach(end_ * c_.columns, function);
    ForEach(end_ * (c_.columns / 128), DotFunction{function});
    jax_ep::QuantizeTransposed call = {.type = kBF16,
                                       .num_rows = c_.rows,
                                       .columns = 2 * c_.columns,
                                       .row_blocks = blocks_.capacity(),
                                       .min_amax = 1e-30f,
                                       .power_of_two_scales = c_.power_of_two_scales,
                                       .x = gradient.data(),
                                       .first_rows = first_rows_.As<int32_t>(),
                                       .block_rows = num_rows_.As<int32_t>(),
                                       .values = steps_.values.data(),
                                       .scales = steps_.scales.As<float>(),
                                       .row_values = steps_.row_values.data(),
                                       .row_scales = steps_.row_scales.As<float>()};
    jax_ep::Status status = jax_ep::LaunchQuantizeTransposed(call, nullptr);
    if (!status.ok()) return status.message;
    call.columns = c_.columns;
    call.per_column = true;
    call.min_amax = 1e-4f;
    call.x = activations.data();
    call.values = steps_.activation_values.data();
    call.scales = steps_.activation_scales.As<float>();
    call.row_values = nullptr;
    status = jax_ep::LaunchQuantizeTransposed(call, nullptr);
    if (!status.ok()) return status.message;
    Require(cudaDeviceSynchronize(), "the kernels");
    const std::vector<uint8_t> found = errors.Bytes();
    if (found[0] != 0) return "a gradient in bfloat16 is not near float64";
    if (found[8] != 0) return "a dot product is not near float64";
    return "";
  }

  ActivationCase c_;
  RowBlocks blocks_;
  int64_t end_ = 0;
  ActivationOperands operands_;
  GuardedBuffer first_rows_, num_rows_;
  ActivationResults fused_, steps_;
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_QUANTIZE_ACTIVATION_GRADIENT_RUNNER_H_
