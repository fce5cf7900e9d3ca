// Runs one case of a matmul with MXFP4 weights: makes its operands, launches, compares.
#ifndef JAX_EP_TESTS_CPP_GPU_MXFP4_MXFP4_RUNNER_H_
#define JAX_EP_TESTS_CPP_GPU_MXFP4_MXFP4_RUNNER_H_

#include <cmath>
#include <string>
#include <vector>

#include "ffi/kernels/matmul/grouped_matmul_mxfp4.h"
#include "tests/cpp/gpu/guarded_buffer.h"
#include "tests/cpp/gpu/matmul/matmul_cases.h"

namespace harness {

inline constexpr int64_t kMxFp4Values = 32;  // share a scale

// Bytes of two values, or scales of `range` exponents from `first` on. Those of groups without rows
// keep the buffer's 0xff: a scale is NaN then.
struct MxFp4FillFunction {
  uint64_t seed;
  int first;
  int range;
  uint8_t* data;
  const int32_t* group_rows;
  int64_t group_elements;

  __device__ void operator()(int64_t i) const {
    if (IsPoison(i, INT64_MAX, group_rows, group_elements)) return;
    data[i] = static_cast<uint8_t>(first + static_cast<int>(Hash(seed, i) % range));
  }
};

// Rows of zeros with a single 1, by which every weight is a result.
struct OneHotFunction {
  uint16_t* data;
  int64_t k;

  __device__ void operator()(int64_t i) const { data[i] = i / k % k == i % k ? 0x3f80 : 0; }
};

// Decodes a value and its scale by their definitions.
HARNESS_FUNCTION double DecodeMxFp4(const uint8_t* values, const uint8_t* scales, int64_t i) {
  const double magnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  const int bits = values[i / 2] >> (i % 2 * 4) & 15;
  const int scale = scales[i / kMxFp4Values];
  if (scale == 255) return NAN;
  const double magnitude = ldexp(magnitudes[bits & 7], scale - 127);
  return bits & 8 ? -magnitude : magnitude;
}

// bfloat16 has the products of all values and scales that do not overflow.
struct MxFp4DequantizeFunction {
  const uint8_t* values;
  const uint8_t* scales;
  uint16_t* to;

  __device__ void operator()(int64_t i) const {
    to[i] = ToBFloat16(static_cast<float>(DecodeMxFp4(values, scales, i)));
  }
};

// Weights are [groups, n, k], those of a gradient of the rows [groups, k, n]: k is contracted.
struct MxFp4Case {
  int64_t m, k, n;
  std::vector<int32_t> sizes;
  bool zero_tail = true;
  int64_t num_sms = 0;
  int32_t tile_counter = 0;
  int64_t num_samples = 0;  // 0: every element is checked
  uint64_t seed = 0;
  int first_scale = 116;  // 2^-11
  int num_scales = 8;
  bool is_one_hot = false;
  ElementType out = kBF16;
  bool is_lhs_gradient = false;
};

class MxFp4Runner {
 public:
  explicit MxFp4Runner(const MxFp4Case& c) { Prepare(c); }

  void Prepare(const MxFp4Case& c) {
    case_ = c;
    const int64_t matrices = static_cast<int64_t>(c.sizes.size()) * c.n * c.k;
    const Rows rows(c.sizes, c.m);
    sizes_.Set(c.sizes);
    row_group_.Set(rows.row_group);
    begins_.Set(rows.begins);
    ends_.Set(rows.ends);
    counts_.Set(rows.counts);
    worst_.Reset(sizeof(Worst));
    lhs_.Reset(c.m * c.k * 2);
    if (c.is_one_hot) {
      ForEach(c.m * c.k, OneHotFunction{lhs_.As<uint16_t>(), c.k});
    } else {
      ForEach(c.m * c.k, FillFunction{kBF16, c.seed + 1, lhs_.data(), rows.end * c.k});
    }
    values_.Reset(matrices / 2);
    scales_.Reset(matrices / kMxFp4Values);
    const int32_t* const counts = counts_.As<int32_t>();
    ForEach(matrices / 2,
            MxFp4FillFunction{c.seed + 2, 0, 256, values_.data(), counts, c.n * c.k / 2});
    ForEach(matrices / kMxFp4Values,
            MxFp4FillFunction{c.seed + 3, c.first_scale, c.num_scales, scales_.data(), counts,
                              c.n * c.k / kMxFp4Values});
    out_.Reset(c.m * c.n * jax_ep::ElementBytes(c.out));
  }

  jax_ep::Status Launch(cudaStream_t stream = nullptr, const int32_t* sizes = nullptr) const {
    const jax_ep::MxFp4Matmul call = {
        .lhs = lhs_.data(),
        .rhs = values_.data(),
        .rhs_scales = scales_.data(),
        .group_sizes = sizes != nullptr ? sizes : sizes_.As<int32_t>(),
        .out = out_.data(),
        .zero_tail = case_.zero_tail,
        .num_sms = case_.num_sms};
    jax_ep::GroupedMatmulSizes shape;
    shape.num_groups = static_cast<int64_t>(case_.sizes.size());
    shape.num_rows = case_.m;
    shape.contracted = case_.k;
    shape.columns = case_.n;
    shape.lhs_type = kBF16;
    shape.result_type = case_.out;
    return (case_.is_lhs_gradient
                ? jax_ep::LaunchGroupedMatmulMxFp4LhsGradient
                : jax_ep::LaunchGroupedMatmulMxFp4)(call, shape, case_.tile_counter, stream);
  }

  // Returns what is wrong, or nothing; `worst` keeps the largest error.
  std::string Run(double* worst_error) {
    if (const jax_ep::Status status = Launch(); !status.ok()) return status.message;
    Require(cudaDeviceSynchronize(), "the kernel");
    const Worst none = {0, 0};
    Require(cudaMemcpy(worst_.data(), &none, sizeof none, cudaMemcpyHostToDevice), "cudaMemcpy");
    const int64_t matrices = static_cast<int64_t>(case_.sizes.size()) * case_.n * case_.k;
    dequantized_.Reset(matrices * 2);
    ForEach(matrices,
            MxFp4DequantizeFunction{values_.data(), scales_.data(), dequantized_.As<uint16_t>()});
    const int64_t elements = case_.m * case_.n;
    const int64_t samples = elements == 0 ? 0 : case_.num_samples;
    ForEach(samples != 0 ? samples : elements,
            CheckFunction{false, !case_.is_lhs_gradient, case_.zero_tail, false, kBF16, kBF16,
                          case_.out, case_.k, case_.n, lhs_.data(), dequantized_.data(),
                          out_.data(), row_group_.As<int32_t>(), begins_.As<int32_t>(),
                          ends_.As<int32_t>(), elements, samples, worst_.As<Worst>()});
    Worst worst;
    Require(cudaMemcpy(&worst, worst_.data(), sizeof worst, cudaMemcpyDeviceToHost), "cudaMemcpy");
    const double excess = FromBits(static_cast<uint32_t>(worst.excess >> 32));
    const double error = FromBits(static_cast<uint32_t>(worst.error >> 32));
    *worst_error = std::max(*worst_error, error);
    if (!out_.GuardsAreIntact()) return "written outside of the result";
    if (excess <= 1) return "";
    const int64_t element = static_cast<uint32_t>(worst.excess);
    return "row " + std::to_string(element / case_.n) + " column " +
           std::to_string(element % case_.n) + " is off by " + std::to_string(excess) +
           " tolerances";
  }

  std::vector<uint8_t> Result() const {
    Require(cudaDeviceSynchronize(), "the kernel");
    return out_.Bytes();
  }
  template <typename T>
  T* ResultAs() const {
    return out_.As<T>();
  }
  const uint8_t* values() const { return values_.data(); }
  const uint8_t* scales() const { return scales_.data(); }
  std::vector<uint8_t> Values() const { return values_.Bytes(); }
  std::vector<uint8_t> Scales() const { return scales_.Bytes(); }
  void SetNumSms(int64_t num_sms) { case_.num_sms = num_sms; }
  void SetNumRows(int64_t m) { case_.m = m; }

 private:
  MxFp4Case case_;
  GuardedBuffer sizes_, row_group_, begins_, ends_, counts_, worst_, lhs_, values_, scales_,
      dequantized_, out_;
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MXFP4_MXFP4_RUNNER_H_
