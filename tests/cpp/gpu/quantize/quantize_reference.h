// Quantizes rows by loops over numbers, apart from the arithmetic that the kernels use.
#ifndef JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_REFERENCE_H_
#define JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "ffi/kernels/quantize/quantize.h"
#include "tests/cpp/gpu/numbers.h"

namespace harness {

using jax_ep::ElementType;
using jax_ep::QuantizeKind;

// The finite magnitudes of an eight-bit type, by their codes.
inline std::vector<double> Magnitudes(bool is_e5m2) {
  const int mantissa_bits = is_e5m2 ? 2 : 3;
  const int bias = is_e5m2 ? 15 : 7;
  const int largest = is_e5m2 ? 0x7b : 0x7e;
  std::vector<double> magnitudes;
  for (int code = 0; code <= largest; ++code) {
    const int exponent = code >> mantissa_bits;
    const double fraction = std::ldexp(code & ((1 << mantissa_bits) - 1), -mantissa_bits);
    magnitudes.push_back(
        std::ldexp(exponent > 0 ? 1 + fraction : fraction, std::max(exponent, 1) - bias));
  }
  return magnitudes;
}

inline constexpr uint8_t kNanCode = 0x7f;

// Returns kNanCode for each NaN, and other codes as they are.
inline uint8_t Canonical(bool is_e5m2, uint8_t code) {
  return (code & 0x7f) > (is_e5m2 ? 0x7c : 0x7e) ? kNanCode : code;
}

// Returns the code of the nearest value. In the middle of two it is the even code.
inline uint8_t Encode(const std::vector<double>& magnitudes, float value) {
  if (std::isnan(value)) return kNanCode;
  const double magnitude = std::abs(double{value});
  const auto above = std::lower_bound(magnitudes.begin(), magnitudes.end(), magnitude);
  auto code = static_cast<uint8_t>(above - magnitudes.begin());
  if (above == magnitudes.end()) {
    --code;
  } else if (code > 0) {
    const double up = *above - magnitude;
    const double down = magnitude - above[-1];
    if (down < up || (down == up && code % 2 == 1)) --code;
  }
  return static_cast<uint8_t>(code | (std::signbit(value) ? 0x80 : 0));
}

// Values and scales of one row.
struct QuantizedRow {
  std::vector<uint8_t> values;
  std::vector<float> scales;
};

inline float ReferenceScale(const jax_ep::Quantize& call, const float* block, int64_t count) {
  float amax = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(block[i])) return std::numeric_limits<float>::quiet_NaN();
    amax = std::max(amax, std::abs(block[i]));
  }
  const double largest = call.kind == QuantizeKind::kRowE5M2 ? 57344 : 448;
  const float scale = std::max(amax, call.min_amax) * static_cast<float>(1 / largest);
  if (!call.power_of_two_scales) return scale;
  int exponent;
  const float mantissa = std::frexp(scale, &exponent);
  return std::ldexp(1.0f, mantissa == 0.5f ? exponent - 1 : exponent);
}

inline QuantizedRow ReferenceRow(const jax_ep::Quantize& call, const float* row) {
  static const std::vector<double> tables[] = {Magnitudes(false), Magnitudes(true)};
  const std::vector<double>& magnitudes = tables[call.kind == QuantizeKind::kRowE5M2];
  const int64_t block = call.kind == QuantizeKind::kBlock128 ? 128 : call.columns;
  QuantizedRow result;
  for (int64_t first = 0; first < call.columns; first += block) {
    const int64_t count = std::min(block, call.columns - first);
    const float scale = ReferenceScale(call, row + first, count);
    const float factor = 1.0f / scale;
    result.scales.push_back(scale);
    for (int64_t i = first; i < first + count; ++i) {
      result.values.push_back(Encode(magnitudes, row[i] * factor));
    }
  }
  return result;
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_REFERENCE_H_
