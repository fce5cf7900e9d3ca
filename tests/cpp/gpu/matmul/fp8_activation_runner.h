// Runs one case of the FP8 matmul with a gated activation: makes its operands, launches, compares
// with sums in float64.
#ifndef JAX_EP_TESTS_CPP_GPU_MATMUL_FP8_ACTIVATION_RUNNER_H_
#define JAX_EP_TESTS_CPP_GPU_MATMUL_FP8_ACTIVATION_RUNNER_H_

#include <string>
#include <vector>

#include "ffi/kernels/matmul/grouped_matmul_fp8.h"
#include "tests/cpp/gpu/guarded_buffer.h"
#include "tests/cpp/gpu/matmul/fp8_check.h"
#include "tests/cpp/gpu/matmul/matmul_cases.h"

namespace harness {

struct Fp8ActivationCase {
  Numbers numbers;
  int64_t m, k, f;
  std::vector<int32_t> sizes;
  bool is_geglu = false;
  bool is_power_of_two = false;
  bool has_weights = false;
  bool keeps = false;  // the pre-activation
  int64_t num_sms = 0;
  int32_t tile_counter = 0;
  int64_t nan_row = -1;     // the row of lhs with a NaN; -1: none
  int64_t num_samples = 0;  // 0: every row and block is checked
  uint64_t seed = 0;
};

// Numbers of which the activation's bend shows.
struct SmallScaleFillFunction {
  uint64_t seed;
  float* data;
  int64_t poison_from;

  __device__ void operator()(int64_t i) const {
    if (i < poison_from) data[i] = (RandomNumber(seed, i) + 1.5f) * 0x1p-11f;
  }
};

struct PutFunction {
  uint8_t* to;
  __device__ void operator()(int64_t) const { *to = 0x7f; }
};

// Checks one row's block of 128 columns.
struct Fp8ActivationCheckFunction {
  Numbers numbers;
  bool is_geglu, is_power_of_two;
  int64_t k, f;
  const uint8_t* lhs;
  const float* lhs_scales;
  const uint8_t* rhs;
  const float* rhs_scales;
  const float* row_weights;  // or null
  const uint8_t* out;
  const float* out_scales;
  const uint16_t* pre_activation;  // or null
  const int32_t* row_group;
  int64_t num_elements;
  int64_t num_samples;
  Worst* worst;

  __device__ void operator()(int64_t item) const {
    const int64_t i = CheckedElement(item, num_samples, num_elements);
    const int64_t blocks = f / kBlock;
    const int64_t m = i / blocks;
    const int64_t first = i % blocks * kBlock;
    const int64_t group = row_group[m];
    const float scale = out_scales[i];
    bool ok = true;
    if (group < 0) {  // the tail keeps the buffer's bytes
      ok = __float_as_uint(scale) == 0xffffffff;
      for (int64_t n = first; n < first + kBlock; ++n) ok = ok && out[m * f + n] == 0xff;
      return worst->Keep(i, ok ? 0 : 1e30, 0);
    }
    const double weight = row_weights == nullptr ? 1.0 : row_weights[m];
    double largest = 0, error_of_largest = 0, excess = 0;
    bool is_nan = false;
    for (int64_t n = first; n < first + kBlock; ++n) {
      double gate, up, gate_error, up_error;
      Sum(m, group, n, &gate, &gate_error);
      Sum(m, group, f + n, &up, &up_error);
      if (pre_activation != nullptr) {
        excess = fmax(excess, Excess(pre_activation[m * 2 * f + n], gate, gate_error));
        excess = fmax(excess, Excess(pre_activation[m * 2 * f + f + n], up, up_error));
      }
      const double u =
          is_geglu ? 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) : gate;
      const double active = gate / (1 + exp(-u));
      const double value = active * up * weight;
      // The slope is at most 1.13.
      const double error =
          fabs(weight) * (1.13 * gate_error * (fabs(up) + up_error) + fabs(active) * up_error) +
          0x1p-17 * fabs(value);
      is_nan = is_nan || isnan(value);
      largest = fmax(largest, fabs(value));
      error_of_largest = fmax(error_of_largest, error);
      if (isnan(value) || isnan(scale)) continue;
      const double got = Decode(out[m * f + n], false) * scale;
      const double rounding = fmax(0x1p-10 * scale, fabs(value) * 0x1p-4) * 1.001;
      excess = fmax(excess, fabs(got - value) <= 1e300
                                ? fabs(got - value) / (rounding + 1.1 * error_of_largest)
                                : 1e30);
    }
    if (is_nan) {
      for (int64_t n = first; n < first + kBlock; ++n) ok = ok && (out[m * f + n] & 0x7f) == 0x7f;
      return worst->Keep(i, ok && isnan(scale) ? 0 : 1e30, 0);
    }
    const double low = Scale(largest - error_of_largest), high = Scale(largest + error_of_largest);
    if (!(scale >= low * (1 - 1e-6) && scale <= high * (1 + 1e-6))) excess = 1e30;
    worst->Keep(i, excess, 0);
  }

 private:
  static constexpr int64_t kBlock = jax_ep::kFp8Block;

  __device__ void Sum(int64_t m, int64_t group, int64_t column, double* sum, double* error) const {
    const int64_t k_blocks = (k + kBlock - 1) / kBlock;
    const int64_t n_blocks = 2 * f / kBlock;
    double magnitude = 0;
    *sum = 0;
    for (int64_t at = 0; at < k; ++at) {
      const double product =
          Decode(lhs[m * k + at], false) * Decode(rhs[(group * 2 * f + column) * k + at], false) *
          lhs_scales[m * k_blocks + at / kBlock] *
          rhs_scales[(group * n_blocks + column / kBlock) * k_blocks + at / kBlock];
      *sum += product;
      magnitude += fabs(product);
    }
    *error = numbers == Numbers::kExact ? 0 : kFp8SumError * magnitude;
  }

  __device__ double Excess(uint16_t bits, double sum, double error) const {
    if (isnan(sum)) return isnan(FromBFloat16(bits)) ? 0 : 1e30;
    const double difference = fabs(FromBFloat16(bits) - sum);
    return difference <= 1.01 * 0x1p-8 * fabs(sum) + error ? 0 : 1e30;
  }

  __device__ double Scale(double amax) const {
    const double scale = fmax(amax, 1e-4) / 448;
    return is_power_of_two ? exp2(ceil(log2(scale * (1 - 1e-9)))) : scale;
  }
};

class Fp8ActivationRunner {
 public:
  explicit Fp8ActivationRunner(const Fp8ActivationCase& c) { Prepare(c); }

  void Prepare(const Fp8ActivationCase& c) {
    case_ = c;
    const int64_t groups = static_cast<int64_t>(c.sizes.size());
    const int64_t k_blocks = (c.k + 127) / 128;
    const int64_t matrix_scales = 2 * c.f / 128 * k_blocks;
    const Rows rows(c.sizes, c.m);
    sizes_.Set(c.sizes);
    row_group_.Set(rows.row_group);
    counts_.Set(rows.counts);
    worst_.Reset(sizeof(Worst));
    lhs_.Reset(c.m * c.k);
    rhs_.Reset(groups * 2 * c.f * c.k);
    lhs_scales_.Reset(c.m * k_blocks * sizeof(float));
    rhs_scales_.Reset(groups * matrix_scales * sizeof(float));
    weights_.Reset(c.m * sizeof(float));
    out_.Reset(c.m * c.f);
    out_scales_.Reset(c.m * (c.f / 128) * sizeof(float));
    pre_activation_.Reset(c.keeps ? c.m * 2 * c.f * 2 : 16);
    const int32_t* const counts = counts_.As<int32_t>();
    ForEach(c.m * c.k, Fp8FillFunction{c.numbers, false, c.seed + 1, lhs_.data(), rows.end * c.k});
    ForEach(groups * 2 * c.f * c.k, Fp8FillFunction{c.numbers, false, c.seed + 2, rhs_.data(),
                                                    groups * 2 * c.f * c.k, counts, 2 * c.f * c.k});
    if (c.numbers == Numbers::kExact) {
      ForEach(c.m * k_blocks, ScaleFillFunction{c.numbers, c.seed + 3, lhs_scales_.As<float>(),
                                                rows.end * k_blocks});
    } else {
      ForEach(c.m * k_blocks,
              SmallScaleFillFunction{c.seed + 3, lhs_scales_.As<float>(), rows.end * k_blocks});
    }
    ForEach(groups * matrix_scales,
            ScaleFillFunction{c.numbers, c.seed + 4, rhs_scales_.As<float>(),
                              groups * matrix_scales, counts, matrix_scales});
    ForEach(c.m, FillFunction{kF32, c.seed + 5, weights_.data(), rows.end});
    if (c.nan_row >= 0) ForEach(1, PutFunction{lhs_.data() + c.nan_row * c.k});
  }

  jax_ep::Status Launch(cudaStream_t stream = nullptr) const {
    const jax_ep::Fp8Matmul call = {.kind = Fp8Kind::kBlock128,
                                    .lhs = lhs_.data(),
                                    .lhs_scales = lhs_scales_.As<float>(),
                                    .rhs = rhs_.data(),
                                    .rhs_scales = rhs_scales_.As<float>(),
                                    .group_sizes = sizes_.As<int32_t>(),
                                    .out = out_.data(),
                                    .zero_tail = false,
                                    .num_sms = case_.num_sms};
    const jax_ep::Fp8Activation activation = {
        .activation = case_.is_geglu ? jax_ep::Activation::kGeglu : jax_ep::Activation::kSwiglu,
        .power_of_two_scales = case_.is_power_of_two,
        .row_weights = case_.has_weights ? weights_.As<float>() : nullptr,
        .out_scales = out_scales_.As<float>(),
        .pre_activation = case_.keeps ? pre_activation_.data() : nullptr};
    jax_ep::GroupedMatmulSizes sizes;
    sizes.num_groups = static_cast<int64_t>(case_.sizes.size());
    sizes.num_rows = case_.m;
    sizes.contracted = case_.k;
    sizes.columns = case_.f;
    return jax_ep::LaunchGroupedMatmulFp8Activation(call, activation, sizes, case_.tile_counter,
                                                    stream);
  }

  // Returns what is wrong, or nothing.
  std::string Run() {
    if (const jax_ep::Status status = Launch(); !status.ok()) return status.message;
    Require(cudaDeviceSynchronize(), "the kernel");
    const Worst none = {0, 0};
    Require(cudaMemcpy(worst_.data(), &none, sizeof none, cudaMemcpyHostToDevice), "cudaMemcpy");
    const int64_t elements = case_.m * (case_.f / 128);
    const int64_t samples = case_.num_samples;
    ForEach(
        samples != 0 ? samples : elements,
        Fp8ActivationCheckFunction{
            case_.numbers, case_.is_geglu, case_.is_power_of_two, case_.k, case_.f, lhs_.data(),
            lhs_scales_.As<float>(), rhs_.data(), rhs_scales_.As<float>(),
            case_.has_weights ? weights_.As<float>() : nullptr, out_.data(),
            out_scales_.As<float>(), case_.keeps ? pre_activation_.As<const uint16_t>() : nullptr,
            row_group_.As<int32_t>(), elements, samples, worst_.As<Worst>()});
    Worst worst;
    Require(cudaMemcpy(&worst, worst_.data(), sizeof worst, cudaMemcpyDeviceToHost), "cudaMemcpy");
    if (!out_.GuardsAreIntact() || !out_scales_.GuardsAreIntact() ||
        !pre_activation_.GuardsAreIntact()) {
      return "written outside of the results";
    }
    const double excess = FromBits(static_cast<uint32_t>(worst.excess >> 32));
    if (excess <= 1) return "";
    const int64_t blocks = case_.f / 128;
    const int64_t element = static_cast<uint32_t>(worst.excess);
    return "row " + std::to_string(element / blocks) + " block " +
           std::to_string(element % blocks) + " is off by " + std::to_string(excess) +
           " tolerances";
  }

  std::vector<uint8_t> Result() const {
    Require(cudaDeviceSynchronize(), "the kernel");
    std::vector<uint8_t> bytes = out_.Bytes();
    const std::vector<uint8_t> scales = out_scales_.Bytes();
    bytes.insert(bytes.end(), scales.begin(), scales.end());
    return bytes;
  }
  void SetNumSms(int64_t num_sms) { case_.num_sms = num_sms; }

 private:
  Fp8ActivationCase case_;
  GuardedBuffer sizes_, row_group_, counts_, worst_, lhs_, rhs_, lhs_scales_, rhs_scales_;
  GuardedBuffer weights_, out_, out_scales_, pre_activation_;
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MATMUL_FP8_ACTIVATION_RUNNER_H_
