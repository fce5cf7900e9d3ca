// Operands of the FP8 matmul, and the comparison of its results with sums in float64.
#ifndef JAX_EP_TESTS_CPP_GPU_MATMUL_FP8_CHECK_H_
#define JAX_EP_TESTS_CPP_GPU_MATMUL_FP8_CHECK_H_

#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>

#include "ffi/device/matmul/sm90/fp8_params.h"
#include "ffi/kernels/matmul/call.h"
#include "tests/cpp/gpu/matmul/matmul_check.h"

namespace harness {

using jax_ep::Fp8Kind;

// How operands are drawn.
enum class Numbers {
  kExact,  // small integers and powers of two: every sum is exact, also with 14 bits
  kRandom  // uniform up to the largest value
};

HARNESS_FUNCTION bool IsE5M2(Fp8Kind kind, bool is_lhs) {
  return is_lhs && kind == Fp8Kind::kRowE5M2;
}

__device__ inline double Decode(uint8_t bits, bool is_e5m2) {
  const __half_raw half = __nv_cvt_fp8_to_halfraw(bits, is_e5m2 ? __NV_E5M2 : __NV_E4M3);
  return FromFloat16(half.x);
}

// 8-bit values. Elements from `poison_from` on, and the matrices of groups without rows, keep the
// buffer's 0xff, which is NaN.
struct Fp8FillFunction {
  Numbers numbers;
  bool is_e5m2;
  uint64_t seed;
  uint8_t* data;
  int64_t poison_from;
  const int32_t* group_rows = nullptr;  // or null
  int64_t group_elements = 1;

  __device__ void operator()(int64_t i) const {
    if (IsPoison(i, poison_from, group_rows, group_elements)) return;
    const float value = numbers == Numbers::kExact
                            ? static_cast<float>(static_cast<int>(Hash(seed, i) % 5) - 2)
                            : RandomNumber(seed, i) * (is_e5m2 ? 57344.0f : 448.0f);
    data[i] = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, is_e5m2 ? __NV_E5M2 : __NV_E4M3);
  }
};

// Scales: powers of two from 1/2 to 4, or numbers around 2^-8.
struct ScaleFillFunction {
  Numbers numbers;
  uint64_t seed;
  float* data;
  int64_t poison_from;
  const int32_t* group_rows = nullptr;  // or null
  int64_t group_elements = 1;

  __device__ void operator()(int64_t i) const {
    if (IsPoison(i, poison_from, group_rows, group_elements)) return;
    data[i] = numbers == Numbers::kExact
                  ? exp2f(static_cast<float>(static_cast<int>(Hash(seed, i) % 4) - 1))
                  : (RandomNumber(seed, i) + 1.5f) * 0x1p-8f;
  }
};

// An error that grows with the sum of absolute products: the tensor cores align 32 products and
// their sum, and cut off what is below about 2^-13 of the largest.
inline constexpr double kFp8SumError = 0x1p-11;

struct Fp8CheckFunction {
  Fp8Kind kind;
  Numbers numbers;
  bool zero_tail;
  bool out_is_float32;
  int64_t k, n;
  const uint8_t* lhs;
  const float* lhs_scales;
  const uint8_t* rhs;
  const float* rhs_scales;
  const void* out;
  const int32_t* row_group;  // the group of each row; -1: the tail
  int64_t num_elements;
  int64_t num_samples;  // 0: all elements
  Worst* worst;

  __device__ void operator()(int64_t item) const {
    const int64_t i = CheckedElement(item, num_samples, num_elements);
    const int64_t m = i / n;
    const int64_t column = i % n;
    const int64_t group = row_group[m];
    if (group < 0) return ReportTail(i);
    double sum = 0;
    double magnitude = 0;
    for (int64_t at = 0; at < k; ++at) {
      const double product = Decode(lhs[m * k + at], IsE5M2(kind, true)) *
                             Decode(rhs[(group * n + column) * k + at], IsE5M2(kind, false)) *
                             Scale(m, group, column, at);
      sum += product;
      magnitude += fabs(product);
    }
    Report(i, sum, magnitude);
  }

 private:
  __device__ double Scale(int64_t m, int64_t group, int64_t column, int64_t at) const {
    constexpr int64_t kBlock = jax_ep::kFp8Block;
    if (kind != Fp8Kind::kBlock128) {
      return double{lhs_scales[m]} * rhs_scales[group * n + column];
    }
    const int64_t k_blocks = (k + kBlock - 1) / kBlock;
    const int64_t n_blocks = (n + kBlock - 1) / kBlock;
    return double{lhs_scales[m * k_blocks + at / kBlock]} *
           rhs_scales[(group * n_blocks + column / kBlock) * k_blocks + at / kBlock];
  }

  __device__ void ReportTail(int64_t i) const {
    const int bytes = out_is_float32 ? 4 : 2;
    bool ok = true;
    for (int b = 0; b < bytes; ++b) {
      ok = ok && static_cast<const uint8_t*>(out)[i * bytes + b] == (zero_tail ? 0 : 0xff);
    }
    worst->Keep(i, ok ? 0 : 1e30, 0);
  }

  __device__ void Report(int64_t i, double sum, double magnitude) const {
    const ElementType type = out_is_float32 ? kF32 : kBF16;
    const double got = Element(type, out, i);
    if (numbers == Numbers::kExact) return worst->Keep(i, got == RoundTo(type, sum) ? 0 : 1e30, 0);
    const double error = fabs(got - sum);
    const double unit = out_is_float32 ? 0x1p-24 : 0x1p-8;
    const double tolerance = 1.01 * unit * fabs(sum) + kFp8SumError * magnitude;
    worst->Keep(i, error <= 1e30 ? error / tolerance : 1e30,  // NaN and infinity too
                out_is_float32 && error <= 1e30 ? error / magnitude : 0);
  }
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MATMUL_FP8_CHECK_H_
