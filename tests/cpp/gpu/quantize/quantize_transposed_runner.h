// Calls of the kernel that quantizes the rows of groups, transposed, and their results by loops
// over numbers.
#ifndef JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_TRANSPOSED_RUNNER_H_
#define JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_TRANSPOSED_RUNNER_H_

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "ffi/kernels/quantize/quantize_transposed.h"
#include "tests/cpp/gpu/guarded_buffer.h"
#include "tests/cpp/gpu/quantize/quantize_inputs.h"
#include "tests/cpp/gpu/quantize/quantize_reference.h"
#include "tests/cpp/gpu/quantize/row_blocks.h"

namespace harness {

using jax_ep::kBF16;
using jax_ep::kF16;
using jax_ep::kF32;
using jax_ep::kF8E4M3;
using jax_ep::QuantizeTransposed;

struct TransposedCase {
  ElementType type;
  bool per_column;
  bool power_of_two_scales;
  bool zero_tail;
  int64_t rows, columns;
  std::vector<int32_t> sizes;
  int64_t offset = 0;       // elements by which x begins after an aligned address
  int64_t scale_block = 0;  // values of x that share a scale, if x is quantized
  bool with_rows = false;   // quantizes the rows as they are, too

  std::string Name() const {
    char text[128];
    std::snprintf(text, sizeof text, "%s%s%s%s%s %d x %d in %d + %d",
                  type == kF8E4M3 ? "f8" : TypeName(type), per_column ? " per column" : "",
                  power_of_two_scales ? " powers" : "", zero_tail ? " zero tail" : "",
                  with_rows ? " with rows" : "", int(rows), int(columns), int(sizes.size()),
                  int(offset));
    return text;
  }
};

// Columns of very different magnitudes. Some are zeros, are so small that the least magnitude
// counts, have only halves and integers, or one value that is no number.
inline std::vector<float> Numbers(const TransposedCase& c) {
  std::mt19937 random(static_cast<unsigned>(c.columns * 8 + c.rows));
  std::normal_distribution<float> normal;
  std::vector<float> numbers(c.rows * c.columns);
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t column = 0; column < c.columns; ++column) {
      float& number = numbers[row * c.columns + column];
      const int64_t kind = column % 16;
      number = kind == 2   ? 0.0f
               : kind == 3 ? 1e-6f * normal(random)
               : kind == 4 ? 0.5f * static_cast<float>(random() % 64) - 16
                           : std::ldexp(normal(random), static_cast<int>(kind) - 8);
      if (column / 128 % 4 == 3 && column % 128 == 6 && row % 200 == 77) number = std::nanf("");
      if (column / 128 % 4 == 1 && kind == 7 && row == 3) {
        number = -std::numeric_limits<float>::infinity();
      }
    }
  }
  return numbers;
}

// Rounds numbers to E4M3 values with scales, in place, and returns both.
inline QuantizedRow QuantizeNumbers(const TransposedCase& c, std::vector<float>* numbers) {
  jax_ep::Quantize call{};
  call.kind = c.scale_block > 0 ? QuantizeKind::kBlock128 : QuantizeKind::kRow;
  call.columns = c.columns;
  call.min_amax = 1e-4f;
  call.power_of_two_scales = c.power_of_two_scales;
  const std::vector<double> magnitudes = Magnitudes(false);
  const int64_t block = c.scale_block > 0 ? c.scale_block : c.columns;
  QuantizedRow all;
  for (int64_t row = 0; row < c.rows; ++row) {
    float* const first = &(*numbers)[row * c.columns];
    const QuantizedRow one = ReferenceRow(call, first);
    for (int64_t i = 0; i < c.columns; ++i) {
      const uint8_t code = Canonical(false, one.values[i]);
      const double magnitude = code == kNanCode ? NAN : magnitudes[code & 0x7f];
      first[i] = static_cast<float>(code >> 7 ? -magnitude : magnitude) * one.scales[i / block];
    }
    all.values.insert(all.values.end(), one.values.begin(), one.values.end());
    all.scales.insert(all.scales.end(), one.scales.begin(), one.scales.end());
  }
  return all;
}

// The calls of a case, with their operands and results on the GPU.
class TransposedRunner {
 public:
  explicit TransposedRunner(const TransposedCase& c)
      : c_(c), numbers_(Numbers(c)), blocks_(c.sizes, c.rows) {
    QuantizedRow rows;
    if (c.type == kF8E4M3) rows = QuantizeNumbers(c, &numbers_);
    x_scales_.Set(rows.scales);
    const std::vector<uint8_t> bytes = c.type == kF8E4M3 ? rows.values : Round(c.type, &numbers_);
    x_.Reset(bytes.size(), c.offset * jax_ep::ElementBytes(c.type));
    Require(cudaMemcpy(x_.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "x");
    first_rows_.Set(blocks_.first_rows);
    num_rows_.Set(blocks_.num_rows);
    scales_per_block_ = c.per_column ? c.columns : column_blocks();
    values_.Reset(blocks_.capacity() * c.columns * 128);
    scales_.Reset(blocks_.capacity() * scales_per_block_ * 4);
    if (!c.with_rows) return;
    row_values_.Reset(c.rows * c.columns, c.offset);
    row_scales_.Reset(c.rows * column_blocks() * 4);
  }

  // Returns what is wrong with the results, or "".
  std::string Run() {
    const QuantizeTransposed call = {.type = c_.type,
                                     .num_rows = c_.rows,
                                     .columns = c_.columns,
                                     .row_blocks = blocks_.capacity(),
                                     .per_column = c_.per_column,
                                     .zero_tail = c_.zero_tail,
                                     .min_amax = 1e-4f,
                                     .power_of_two_scales = c_.power_of_two_scales,
                                     .x = x_.data(),
                                     .x_scales = x_scales_.As<float>(),
                                     .x_scales_per_row = c_.scale_block > 0 ? column_blocks() : 1,
                                     .first_rows = first_rows_.As<int32_t>(),
                                     .block_rows = num_rows_.As<int32_t>(),
                                     .values = values_.data(),
                                     .scales = scales_.As<float>(),
                                     .row_values = c_.with_rows ? row_values_.data() : nullptr,
                                     .row_scales = row_scales_.As<float>()};
    const jax_ep::Status status = jax_ep::LaunchQuantizeTransposed(call, Stream());
    if (!status.ok()) return status.message;
    Require(cudaStreamSynchronize(Stream()), "the kernel");
    if (!values_.GuardsAreIntact() || !scales_.GuardsAreIntact()) return "a store out of bounds";
    got_values_ = values_.Bytes();
    got_scales_ = scales_.Bytes();
    for (int64_t block = 0; block < blocks_.capacity(); ++block) {
      for (int64_t s = 0; s < scales_per_block_; ++s) {
        const std::string problem = Compare(block, s);
        if (!problem.empty()) return problem;
      }
    }
    return c_.with_rows ? CompareRows() : "";
  }

 private:
  int64_t column_blocks() const { return (c_.columns + 127) / 128; }

  // Compares one scale and all that it scales.
  std::string Compare(int64_t block, int64_t scale_index) const {
    static const std::vector<double> magnitudes = Magnitudes(false);
    const int64_t width = c_.per_column ? 1 : 128;
    const int64_t first = scale_index * width;
    const int64_t last = std::min(first + width, c_.columns);
    const bool is_written = blocks_.num_rows[block] > 0 || c_.zero_tail;
    std::vector<float> expected;
    for (int64_t column = first; column < last; ++column) {
      for (int64_t i = 0; i < 128; ++i) {
        const int64_t row = blocks_.first_rows[block] + i;
        expected.push_back(i < blocks_.num_rows[block] ? numbers_[row * c_.columns + column] : 0);
      }
    }
    const float scale =
        is_written ? ReferenceScale(AsRows(), expected.data(), expected.size()) : FromBits(~0u);
    const float factor = 1.0f / scale;
    float got_scale;
    std::memcpy(&got_scale, &got_scales_[4 * (block * scales_per_block_ + scale_index)], 4);
    const bool both_nan = std::isnan(got_scale) && std::isnan(scale);
    if (!both_nan && Bits(got_scale) != Bits(scale)) {
      return At("scale", block, first, got_scale, scale);
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      const uint8_t got = got_values_[(block * c_.columns + first) * 128 + i];
      const uint8_t wanted = is_written ? Encode(magnitudes, expected[i] * factor) : 0xff;
      if (is_written ? Canonical(false, got) != Canonical(false, wanted) : got != wanted) {
        return At("value", block, first * 128 + static_cast<int64_t>(i), got, wanted);
      }
    }
    return "";
  }

  jax_ep::Quantize AsRows() const {
    jax_ep::Quantize call{};
    call.kind = QuantizeKind::kBlock128;
    call.columns = c_.columns;
    call.min_amax = 1e-4f;
    call.power_of_two_scales = c_.power_of_two_scales;
    return call;
  }

  // Compares the rows of groups with those that are quantized as they are. Others are not written.
  std::string CompareRows() const {
    if (!row_values_.GuardsAreIntact() || !row_scales_.GuardsAreIntact()) {
      return "a store of rows out of bounds";
    }
    const std::vector<uint8_t> values = row_values_.Bytes(), scale_bytes = row_scales_.Bytes();
    std::vector<float> scales(c_.rows * column_blocks());
    std::memcpy(scales.data(), scale_bytes.data(), scale_bytes.size());
    const int64_t last = blocks_.used - 1;
    const int64_t end =
        blocks_.used > 0 ? blocks_.first_rows[last] + blocks_.num_rows[last] : int64_t{0};
    for (int64_t row = 0; row < c_.rows; ++row) {
      const bool is_written = row < end;
      const QuantizedRow expected = ReferenceRow(AsRows(), &numbers_[row * c_.columns]);
      for (int64_t i = 0; i < column_blocks(); ++i) {
        const float got = scales[row * column_blocks() + i];
        const float wanted = is_written ? expected.scales[i] : FromBits(~0u);
        if (std::isnan(got) && std::isnan(wanted)) continue;
        if (Bits(got) != Bits(wanted)) return At("scale", row, i, got, wanted, "row");
      }
      for (int64_t i = 0; i < c_.columns; ++i) {
        const uint8_t got = Canonical(false, values[row * c_.columns + i]);
        const uint8_t wanted = is_written ? Canonical(false, expected.values[i]) : kNanCode;
        if (got != wanted) return At("value", row, i, got, wanted, "row");
      }
    }
    return "";
  }

  static std::string At(const char* what, int64_t index, int64_t i, double got, double expected,
                        const char* of = "row block") {
    char text[128];
    std::snprintf(text, sizeof text, "%s %d of %s %d is %.9g; expected %.9g", what, int(i), of,
                  int(index), got, expected);
    return text;
  }

  TransposedCase c_;
  std::vector<float> numbers_;
  RowBlocks blocks_;
  int64_t scales_per_block_ = 0;
  GuardedBuffer x_, x_scales_, first_rows_, num_rows_, values_, scales_, row_values_, row_scales_;
  std::vector<uint8_t> got_values_, got_scales_;
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_TRANSPOSED_RUNNER_H_
