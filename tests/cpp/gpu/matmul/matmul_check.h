// Random operands, and the comparison of results with sums in float64.
#ifndef JAX_EP_TESTS_CPP_GPU_MATMUL_MATMUL_CHECK_H_
#define JAX_EP_TESTS_CPP_GPU_MATMUL_MATMUL_CHECK_H_

#include <cmath>
#include <cstdint>

#include "ffi/runtime/calls/buffers.h"
#include "tests/cpp/gpu/for_each.h"
#include "tests/cpp/gpu/numbers.h"

namespace harness {

using jax_ep::ElementType;
using jax_ep::kBF16;
using jax_ep::kF16;
using jax_ep::kF32;

HARNESS_FUNCTION uint32_t Hash(uint64_t seed, uint64_t i) {
  uint64_t x = i * 0x9e3779b97f4a7c15u + seed * 0xbf58476d1ce4e5b9u + 1;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return static_cast<uint32_t>((x ^ x >> 31) >> 16);
}

// Returns a number in [-1, 1).
HARNESS_FUNCTION float RandomNumber(uint64_t seed, uint64_t i) {
  return static_cast<float>(static_cast<int32_t>(Hash(seed, i))) * 0x1p-31f;
}

// Accumulators are RandomNumber(kAccumulatorSeed, element) before the call.
inline constexpr uint64_t kAccumulatorSeed = 3;

// Reads a 16-bit number.
HARNESS_FUNCTION uint16_t ToBits(ElementType type, float value) {
  return type == kBF16 ? ToBFloat16(value) : ToFloat16(value);
}

// Returns the tolerance of a float32 sum of so many products, relative to the sum of their
// magnitudes. Tensor cores, which 16-bit operands use, truncate where plain additions round.
HARNESS_FUNCTION double SumError(ElementType type, int64_t count) {
  return (type == kF32 ? 0x1p-24 : 0x1p-22) * (4 + sqrt(static_cast<double>(count)));
}

// Returns whether an operand's element keeps the buffer's NaN: from `poison_from` on, and in the
// matrices of groups without rows. `group_rows` may be null.
HARNESS_FUNCTION bool IsPoison(int64_t i, int64_t poison_from, const int32_t* group_rows,
                               int64_t group_elements) {
  return i >= poison_from || (group_rows != nullptr && group_rows[i / group_elements] == 0);
}

// Returns the element that is checked as number `item`: itself, or a sample if there are too many.
HARNESS_FUNCTION int64_t CheckedElement(int64_t item, int64_t num_samples, int64_t num_elements) {
  if (num_samples == 0) return item;
  return (int64_t{Hash(1, item)} << 31 ^ Hash(2, item)) % num_elements;
}

// Random numbers. float32 ones do not fit 16 bits, so that their rounding shows.
struct FillFunction {
  ElementType type;
  uint64_t seed;
  void* data;
  int64_t poison_from;
  const int32_t* group_rows = nullptr;  // or null
  int64_t group_elements = 1;

  __device__ void operator()(int64_t i) const {
    if (IsPoison(i, poison_from, group_rows, group_elements)) return;
    const float value = RandomNumber(seed, i);
    if (type == kF32) {
      static_cast<float*>(data)[i] = value;
    } else {
      static_cast<uint16_t*>(data)[i] = ToBits(type, value);
    }
  }
};

HARNESS_FUNCTION double Element(ElementType type, const void* data, int64_t i) {
  if (type == kF32) return static_cast<const float*>(data)[i];
  const uint16_t bits = static_cast<const uint16_t*>(data)[i];
  return type == kBF16 ? FromBFloat16(bits) : FromFloat16(bits);
}

HARNESS_FUNCTION double RoundTo(ElementType type, double value) {
  const float single = static_cast<float>(value);
  if (type == kF32) return single;
  return type == kBF16 ? FromBFloat16(ToBFloat16(single)) : FromFloat16(ToFloat16(single));
}

// The worst of all elements. The upper half of each word is the bits of a positive float32, so that
// a maximum of integers is a maximum of numbers.
struct Worst {
  unsigned long long excess;  // error / tolerance, and the element's index
  unsigned long long error;   // error / sum of absolute products

  __device__ void Keep(int64_t i, double element_excess, double element_error) {
    const auto high = [](double value) {
      return static_cast<unsigned long long>(Bits(static_cast<float>(value))) << 32;
    };
    MaxInto(&excess, high(element_excess) | static_cast<uint32_t>(i));
    MaxInto(&error, high(element_error));
  }
};

struct CheckFunction {
  bool is_gradient;
  bool transpose;
  bool zero_tail;
  bool accumulates;
  ElementType lhs_type;
  ElementType b_type;  // rhs or out_gradient
  ElementType out_type;
  int64_t k, n;
  const void* lhs;
  const void* right;
  const void* out;
  const int32_t* row_group;  // the group of each row; -1: the tail
  const int32_t* begins;     // the begin of each group's rows
  const int32_t* ends;
  int64_t num_elements;
  int64_t num_samples;  // 0: all elements
  Worst* worst;

  __device__ void operator()(int64_t item) const {
    const int64_t i = CheckedElement(item, num_samples, num_elements);
    bool is_tail = false;
    double sum = 0;
    double magnitude = 0;
    int64_t count = 0;
    const auto add = [&](double left, double other) {
      sum += left * other;
      magnitude += fabs(left * other);
      ++count;
    };
    if (is_gradient) {
      const int64_t group = i / (k * n);
      const int64_t row = i % (k * n) / (transpose ? k : n);
      const int64_t column = i % (transpose ? k : n);
      const int64_t at_k = transpose ? column : row;
      const int64_t at_n = transpose ? row : column;
      for (int64_t m = begins[group]; m < ends[group]; ++m) {
        add(Element(lhs_type, lhs, m * k + at_k), Element(b_type, right, m * n + at_n));
      }
    } else {
      const int64_t m = i / n;
      const int64_t column = i % n;
      const int32_t group = row_group[m];
      is_tail = group < 0;
      for (int64_t at = 0; !is_tail && at < k; ++at) {
        const int64_t element = group * k * n + (transpose ? column * k + at : at * n + column);
        add(Element(lhs_type, lhs, m * k + at), RoundTo(lhs_type, Element(b_type, right, element)));
      }
    }
    Report(i, is_tail, sum, magnitude, count);
  }

  __device__ void Report(int64_t i, bool is_tail, double sum, double magnitude,
                         int64_t count) const {
    double excess = 0;
    double relative = 0;
    const float accumulator = accumulates ? RandomNumber(kAccumulatorSeed, i) : 0;
    sum += accumulator;
    magnitude += fabs(accumulator);
    if (count == 0 && accumulates) {
      if (Bits(static_cast<const float*>(out)[i]) != Bits(accumulator)) excess = 1e30;
    } else if (count == 0) {
      // Exactly +0, or untouched.
      const int bytes = out_type == kF32 ? 4 : 2;
      const uint8_t expected = is_tail && !zero_tail ? 0xff : 0;
      for (int b = 0; b < bytes; ++b) {
        if (static_cast<const uint8_t*>(out)[i * bytes + b] != expected) excess = 1e30;
      }
    } else {
      const double got = Element(out_type, out, i);
      const double error = fabs(got - sum);
      const double unit = out_type == kF32 ? 0x1p-24 : out_type == kBF16 ? 0x1p-8 : 0x1p-11;
      const double tolerance = 1.01 * unit * fabs(sum) + SumError(lhs_type, count) * magnitude +
                               (out_type == kF16 ? 0x1p-24 : 0x1p-126);
      if (sum != sum) {
        excess = got != got ? 0 : 1e30;
      } else {
        excess = error <= 1e30 ? error / tolerance : 1e30;  // NaN and infinity too
        relative = magnitude > 0 && error <= 1e30 ? error / magnitude : 0;
      }
    }
    worst->Keep(i, excess, relative);
  }
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MATMUL_MATMUL_CHECK_H_
