// Runs one case of the FP8 matmul: makes its operands, launches, compares.
#ifndef JAX_EP_TESTS_CPP_GPU_MATMUL_FP8_RUNNER_H_
#define JAX_EP_TESTS_CPP_GPU_MATMUL_FP8_RUNNER_H_

#include <string>
#include <vector>

#include "ffi/kernels/matmul/grouped_matmul_fp8.h"
#include "tests/cpp/gpu/guarded_buffer.h"
#include "tests/cpp/gpu/matmul/fp8_check.h"
#include "tests/cpp/gpu/matmul/matmul_cases.h"

namespace harness {

struct Fp8Case {
  Fp8Kind kind;
  Numbers numbers;
  bool out_is_float32;
  int64_t m, k, n;
  std::vector<int32_t> sizes;
  bool zero_tail = true;
  int64_t num_sms = 0;
  int32_t tile_counter = 0;
  int64_t num_samples = 0;  // 0: every element is checked
  uint64_t seed = 0;

  std::string Name() const {
    return std::string(kind == Fp8Kind::kBlock128 ? "block128"
                       : kind == Fp8Kind::kRow    ? "row"
                                                  : "row e5m2") +
           (out_is_float32 ? " -> f32" : " -> bf16") +
           (numbers == Numbers::kExact ? ", exact" : ", random");
  }
};

class Fp8Runner {
 public:
  explicit Fp8Runner(const Fp8Case& c) { Prepare(c); }

  void Prepare(const Fp8Case& c) {
    case_ = c;
    const bool is_blocked = c.kind == Fp8Kind::kBlock128;
    const int64_t groups = static_cast<int64_t>(c.sizes.size());
    const int64_t k_blocks = is_blocked ? (c.k + 127) / 128 : 1;
    const int64_t matrix_scales = is_blocked ? (c.n + 127) / 128 * k_blocks : c.n;
    const Rows rows(c.sizes, c.m);
    sizes_.Set(c.sizes);
    row_group_.Set(rows.row_group);
    counts_.Set(rows.counts);
    worst_.Reset(sizeof(Worst));
    lhs_.Reset(c.m * c.k);
    rhs_.Reset(groups * c.n * c.k);
    lhs_scales_.Reset(c.m * k_blocks * sizeof(float));
    rhs_scales_.Reset(groups * matrix_scales * sizeof(float));
    out_elements_ = c.m * c.n;
    out_.Reset(out_elements_ * (c.out_is_float32 ? 4 : 2));
    const int32_t* const counts = counts_.As<int32_t>();
    ForEach(c.m * c.k, Fp8FillFunction{c.numbers, IsE5M2(c.kind, true), c.seed + 1, lhs_.data(),
                                       rows.end * c.k});
    ForEach(groups * c.n * c.k,
            Fp8FillFunction{c.numbers, IsE5M2(c.kind, false), c.seed + 2, rhs_.data(),
                            groups * c.n * c.k, counts, c.n * c.k});
    ForEach(c.m * k_blocks,
            ScaleFillFunction{c.numbers, c.seed + 3, lhs_scales_.As<float>(), rows.end * k_blocks});
    ForEach(groups * matrix_scales,
            ScaleFillFunction{c.numbers, c.seed + 4, rhs_scales_.As<float>(),
                              groups * matrix_scales, counts, matrix_scales});
  }

  jax_ep::Status Launch(cudaStream_t stream = nullptr) const {
    const jax_ep::Fp8Matmul call = {.kind = case_.kind,
                                    .lhs = lhs_.data(),
                                    .lhs_scales = lhs_scales_.As<float>(),
                                    .rhs = rhs_.data(),
                                    .rhs_scales = rhs_scales_.As<float>(),
                                    .group_sizes = sizes_.As<int32_t>(),
                                    .out = out_.data(),
                                    .zero_tail = case_.zero_tail,
                                    .num_sms = case_.num_sms};
    jax_ep::GroupedMatmulSizes sizes;
    sizes.num_groups = static_cast<int64_t>(case_.sizes.size());
    sizes.num_rows = case_.m;
    sizes.contracted = case_.k;
    sizes.columns = case_.n;
    sizes.result_type = case_.out_is_float32 ? kF32 : kBF16;
    return jax_ep::LaunchGroupedMatmulFp8(call, sizes, case_.tile_counter, stream);
  }

  // Returns what is wrong, or nothing; `worst` keeps the largest error.
  std::string Run(double* worst_error) {
    if (const jax_ep::Status status = Launch(); !status.ok()) return status.message;
    Require(cudaDeviceSynchronize(), "the kernel");
    const Worst none = {0, 0};
    Require(cudaMemcpy(worst_.data(), &none, sizeof none, cudaMemcpyHostToDevice), "cudaMemcpy");
    const int64_t samples = out_elements_ == 0 ? 0 : case_.num_samples;
    ForEach(samples != 0 ? samples : out_elements_,
            Fp8CheckFunction{case_.kind, case_.numbers, case_.zero_tail, case_.out_is_float32,
                             case_.k, case_.n, lhs_.data(), lhs_scales_.As<float>(), rhs_.data(),
                             rhs_scales_.As<float>(), out_.data(), row_group_.As<int32_t>(),
                             out_elements_, samples, worst_.As<Worst>()});
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
  void SetNumSms(int64_t num_sms) { case_.num_sms = num_sms; }

 private:
  Fp8Case case_;
  int64_t out_elements_ = 0;
  GuardedBuffer sizes_, row_group_, counts_, worst_, lhs_, rhs_, lhs_scales_, rhs_scales_, out_;
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MATMUL_FP8_RUNNER_H_
