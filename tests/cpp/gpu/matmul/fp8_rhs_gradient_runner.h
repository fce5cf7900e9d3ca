// Runs one case of the FP8 weight gradient: makes its operands, launches, compares with sums in
// float64.
#ifndef JAX_EP_TESTS_CPP_GPU_MATMUL_FP8_RHS_GRADIENT_RUNNER_H_
#define JAX_EP_TESTS_CPP_GPU_MATMUL_FP8_RHS_GRADIENT_RUNNER_H_

#include <algorithm>
#include <string>
#include <vector>

#include "ffi/kernels/matmul/grouped_matmul_fp8_rhs_gradient.h"
#include "tests/cpp/gpu/guarded_buffer.h"
#include "tests/cpp/gpu/matmul/fp8_check.h"
#include "tests/cpp/gpu/quantize/row_blocks.h"

namespace harness {

struct Fp8GradientCase {
  Numbers numbers;
  bool out_is_float32;
  bool accumulates;
  int64_t m, k, n;
  std::vector<int32_t> sizes;
  int64_t num_sms = 0;
  int32_t tile_counter = 0;
  int64_t num_samples = 0;  // 0: every element is checked
  uint64_t seed = 0;

  std::string Name() const {
    return std::string(accumulates      ? "accumulated"
                       : out_is_float32 ? "f32"
                                        : "bf16") +
           (numbers == Numbers::kExact ? ", exact" : ", random");
  }
};

// Accumulators before the call: integers if sums are to be exact.
HARNESS_FUNCTION float Fp8Accumulator(Numbers numbers, int64_t i) {
  const float number = RandomNumber(kAccumulatorSeed, i);
  return numbers == Numbers::kExact ? static_cast<float>(static_cast<int>(8 * number)) : number;
}

struct Fp8AccumulatorFunction {
  Numbers numbers;
  float* out;

  __device__ void operator()(int64_t i) const { out[i] = Fp8Accumulator(numbers, i); }
};

struct Fp8GradientCheckFunction {
  Numbers numbers;
  bool out_is_float32;
  bool accumulates;
  int64_t k, n;
  const uint8_t* a;  // [row blocks, k, 128]
  const float* a_scales;
  const uint8_t* b;  // [row blocks, n, 128]
  const float* b_scales;
  const void* out;
  const int32_t* begins;  // row blocks of each group
  const int32_t* ends;
  int64_t num_elements;
  int64_t num_samples;  // 0: all elements
  Worst* worst;

  __device__ void operator()(int64_t item) const {
    constexpr int64_t kBlock = jax_ep::kFp8Block;
    const int64_t i = CheckedElement(item, num_samples, num_elements);
    const int64_t group = i / (k * n), row = i / n % k, column = i % n;
    double sum = 0;
    double magnitude = 0;
    for (int64_t block = begins[group]; block < ends[group]; ++block) {
      const double scale = double{a_scales[block * k + row]} *
                           b_scales[block * ((n + kBlock - 1) / kBlock) + column / kBlock];
      for (int64_t at = 0; at < kBlock; ++at) {
        const double product = scale * Decode(a[(block * k + row) * kBlock + at], false) *
                               Decode(b[(block * n + column) * kBlock + at], false);
        sum += product;
        magnitude += fabs(product);
      }
    }
    const float accumulator = accumulates ? Fp8Accumulator(numbers, i) : 0;
    const double got = Element(out_is_float32 ? kF32 : kBF16, out, i);
    if (begins[group] == ends[group]) {  // a zero, or the accumulator itself
      return worst->Keep(i, Bits(static_cast<float>(got)) == Bits(accumulator) ? 0 : 1e30, 0);
    }
    sum += accumulator;
    magnitude += fabs(accumulator);
    if (numbers == Numbers::kExact) {
      return worst->Keep(i, got == RoundTo(out_is_float32 ? kF32 : kBF16, sum) ? 0 : 1e30, 0);
    }
    const double error = fabs(got - sum);
    const double unit = out_is_float32 ? 0x1p-24 : 0x1p-8;
    const double tolerance = 1.01 * unit * fabs(sum) + kFp8SumError * magnitude;
    worst->Keep(i, error <= 1e30 ? error / tolerance : 1e30,  // NaN and infinity too
                out_is_float32 && error <= 1e30 ? error / magnitude : 0);
  }
};

class Fp8GradientRunner {
 public:
  explicit Fp8GradientRunner(const Fp8GradientCase& c) { Prepare(c); }

  void Prepare(const Fp8GradientCase& c) {
    case_ = c;
    const RowBlocks blocks(c.sizes, c.m);
    row_blocks_ = blocks.capacity();
    const int64_t n_blocks = (c.n + 127) / 128;
    group_sizes_.Set(blocks.group_sizes);
    begins_.Set(blocks.begins);
    ends_.Set(blocks.ends);
    worst_.Reset(sizeof(Worst));
    a_.Reset(row_blocks_ * c.k * 128);
    b_.Reset(row_blocks_ * c.n * 128);
    a_scales_.Reset(row_blocks_ * c.k * sizeof(float));
    b_scales_.Reset(row_blocks_ * n_blocks * sizeof(float));
    out_elements_ = static_cast<int64_t>(c.sizes.size()) * c.k * c.n;
    out_.Reset(out_elements_ * (c.out_is_float32 ? 4 : 2));
    const auto fill = [&](uint64_t seed, const GuardedBuffer& values, int64_t columns) {
      const int64_t count = row_blocks_ * columns * 128;
      ForEach(count, Fp8FillFunction{c.numbers, false, c.seed + seed, values.data(),
                                     blocks.used * columns * 128});
    };
    fill(1, a_, c.k);
    fill(2, b_, c.n);
    ForEach(row_blocks_ * c.k,
            ScaleFillFunction{c.numbers, c.seed + 3, a_scales_.As<float>(), blocks.used * c.k});
    ForEach(row_blocks_ * n_blocks, ScaleFillFunction{c.numbers, c.seed + 4, b_scales_.As<float>(),
                                                      blocks.used * n_blocks});
    FillAccumulators();
  }

  void FillAccumulators() {
    if (!case_.accumulates) return;
    ForEach(out_elements_, Fp8AccumulatorFunction{case_.numbers, out_.As<float>()});
  }

  jax_ep::Status Launch(cudaStream_t stream = nullptr) const {
    const jax_ep::Fp8RhsGradient call = {.a = a_.data(),
                                         .a_scales = a_scales_.As<float>(),
                                         .b = b_.data(),
                                         .b_scales = b_scales_.As<float>(),
                                         .group_sizes = group_sizes_.As<int32_t>(),
                                         .rhs_gradient = out_.data()};
    jax_ep::GroupedMatmulSizes sizes;
    sizes.num_groups = static_cast<int64_t>(case_.sizes.size());
    sizes.num_rows = row_blocks_ * 128;
    sizes.contracted = case_.k;
    sizes.columns = case_.n;
    sizes.rhs_type = case_.out_is_float32 ? kF32 : kBF16;
    return jax_ep::LaunchGroupedMatmulFp8RhsGradient(
        {.has_accumulator = case_.accumulates, .num_sms = case_.num_sms}, call, sizes,
        case_.tile_counter, stream);
  }

  // Returns what is wrong, or nothing; `worst` keeps the largest error.
  std::string Run(double* worst_error) {
    FillAccumulators();
    if (const jax_ep::Status status = Launch(); !status.ok()) return status.message;
    return Check(worst_error);
  }

  std::string Check(double* worst_error) {
    Require(cudaDeviceSynchronize(), "the kernel");
    const Worst none = {0, 0};
    Require(cudaMemcpy(worst_.data(), &none, sizeof none, cudaMemcpyHostToDevice), "cudaMemcpy");
    const int64_t samples = out_elements_ == 0 ? 0 : case_.num_samples;
    ForEach(
        samples != 0 ? samples : out_elements_,
        Fp8GradientCheckFunction{case_.numbers, case_.out_is_float32, case_.accumulates, case_.k,
                                 case_.n, a_.data(), a_scales_.As<float>(), b_.data(),
                                 b_scales_.As<float>(), out_.data(), begins_.As<int32_t>(),
                                 ends_.As<int32_t>(), out_elements_, samples, worst_.As<Worst>()});
    Worst worst;
    Require(cudaMemcpy(&worst, worst_.data(), sizeof worst, cudaMemcpyDeviceToHost), "cudaMemcpy");
    const double excess = FromBits(static_cast<uint32_t>(worst.excess >> 32));
    const double error = FromBits(static_cast<uint32_t>(worst.error >> 32));
    *worst_error = std::max(*worst_error, error);
    if (!out_.GuardsAreIntact()) return "written outside of the result";
    if (excess <= 1) return "";
    const int64_t element = static_cast<uint32_t>(worst.excess);
    return "group " + std::to_string(element / (case_.k * case_.n)) + " row " +
           std::to_string(element / case_.n % case_.k) + " column " +
           std::to_string(element % case_.n) + " is off by " + std::to_string(excess) +
           " tolerances";
  }

  std::vector<uint8_t> Result() const {
    Require(cudaDeviceSynchronize(), "the kernel");
    return out_.Bytes();
  }
  void SetNumSms(int64_t num_sms) { case_.num_sms = num_sms; }

  // The operands, to be written by quantize_transposed.
  uint8_t* a() const { return a_.data(); }
  float* a_scales() const { return a_scales_.As<float>(); }
  uint8_t* b() const { return b_.data(); }
  float* b_scales() const { return b_scales_.As<float>(); }
  int64_t row_blocks() const { return row_blocks_; }

 private:
  Fp8GradientCase case_;
  int64_t row_blocks_ = 0;
  int64_t out_elements_ = 0;
  GuardedBuffer group_sizes_, begins_, ends_, worst_, a_, b_, a_scales_, b_scales_, out_;
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MATMUL_FP8_RHS_GRADIENT_RUNNER_H_
