// Compares the kernel that quantizes the rows of groups, transposed, with loops over numbers, bit
// by bit, on the current GPU.
//
//   quantize_transposed_test [MODE]
//
//   check   every check
//   small   small checks, each buffer an allocation of its own: for compute-sanitizer
//   time    GB/s beside a copy of as many bytes
//   all     check, then time (the default)
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/kernels/quantize/quantize_transposed.h"
#include "tests/cpp/gpu/guarded_buffer.h"
#include "tests/cpp/gpu/quantize/quantize_inputs.h"
#include "tests/cpp/gpu/quantize/quantize_reference.h"
#include "tests/cpp/gpu/quantize/row_blocks.h"

namespace harness {
namespace {

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

  std::string Name() const {
    char text[128];
    std::snprintf(text, sizeof text, "%s%s%s%s %d x %d in %d + %d",
                  type == kF8E4M3 ? "f8" : TypeName(type), per_column ? " per column" : "",
                  power_of_two_scales ? " powers" : "", zero_tail ? " zero tail" : "", int(rows),
                  int(columns), int(sizes.size()), int(offset));
    return text;
  }
};

// Columns of very different magnitudes. Some are zeros, are so small that the least magnitude
// counts, have only halves and integers, or one value that is no number.
std::vector<float> Numbers(const TransposedCase& c) {
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
QuantizedRow QuantizeNumbers(const TransposedCase& c, std::vector<float>* numbers) {
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
    scales_per_block_ = c.per_column ? c.columns : (c.columns + 127) / 128;
    values_.Reset(blocks_.capacity() * c.columns * 128);
    scales_.Reset(blocks_.capacity() * scales_per_block_ * 4);
  }

  // Returns what is wrong with the results, or "".
  std::string Run() {
    const QuantizeTransposed call = {
        .type = c_.type,
        .num_rows = c_.rows,
        .columns = c_.columns,
        .row_blocks = blocks_.capacity(),
        .per_column = c_.per_column,
        .zero_tail = c_.zero_tail,
        .min_amax = 1e-4f,
        .power_of_two_scales = c_.power_of_two_scales,
        .x = x_.data(),
        .x_scales = x_scales_.As<float>(),
        .x_scales_per_row = c_.scale_block > 0 ? (c_.columns + 127) / 128 : 1,
        .first_rows = first_rows_.As<int32_t>(),
        .block_rows = num_rows_.As<int32_t>(),
        .values = values_.data(),
        .scales = scales_.As<float>()};
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
    return "";
  }

 private:
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
    jax_ep::Quantize as_row{};
    as_row.kind = QuantizeKind::kBlock128;
    as_row.min_amax = 1e-4f;
    as_row.power_of_two_scales = c_.power_of_two_scales;
    const float scale =
        is_written ? ReferenceScale(as_row, expected.data(), expected.size()) : FromBits(~0u);
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

  static std::string At(const char* what, int64_t block, int64_t i, double got, double expected) {
    char text[128];
    std::snprintf(text, sizeof text, "%s %d of row block %d is %.9g; expected %.9g", what, int(i),
                  int(block), got, expected);
    return text;
  }

  TransposedCase c_;
  std::vector<float> numbers_;
  RowBlocks blocks_;
  int64_t scales_per_block_ = 0;
  GuardedBuffer x_, x_scales_, first_rows_, num_rows_, values_, scales_;
  std::vector<uint8_t> got_values_, got_scales_;
};

struct Shape {
  int64_t rows, columns;
  std::vector<int32_t> sizes;
};

void Check(const std::vector<Shape>& shapes) {
  CaseCount count;
  for (ElementType type : {kBF16, kF16, kF32, kF8E4M3}) {
    for (const auto& [rows, columns, sizes] : shapes) {
      for (bool per_column : {false, true}) {
        TransposedCase c{type, per_column, false, false, rows, columns, sizes};
        count.Add(c.Name(), TransposedRunner(c).Run());
        c.power_of_two_scales = c.zero_tail = true;
        c.scale_block = 128;
        count.Add(c.Name(), TransposedRunner(c).Run());
        c.offset = 1;
        count.Add(c.Name(), TransposedRunner(c).Run());
      }
    }
  }
  count.Finish("quantize_transposed");
}

}  // namespace
}  // namespace harness

#ifndef JAX_EP_EMULATION  // a CPU's times say nothing
#include "tests/cpp/gpu/quantize/quantize_transposed_timing.h"
#endif

int main(int argc, char** argv) {
  using namespace harness;
  const std::string_view mode = argc > 1 ? argv[1] : "all";
  if (mode == "small") {
    GuardedBuffer::exact = true;
    // Aligned and unaligned rows, partial blocks of both axes, groups that are empty or end early.
    Check({{300, 256, {130, 0, 128, 1}}, {200, 136, {-3, 90, 500}}, {40, 7, {20, 9}}});
  } else if (mode != "time") {
    Check({{1, 1, {1}},
           {128, 128, {128}},
           {700, 520, {128, 256, 0, 130, 1, 100}},
           {515, 640, {-7, 300, 0, 400, 20}},
           {260, 1000, {3, 0, 0, 2}},
           {300, 999, {100, 100, 100}},
           {5, 264, {1, 1, 1, 1, 1, 1, 1, 1}},
           {2000, 2048, {500, 700, 300}}});
  }
#ifndef JAX_EP_EMULATION
  if (mode == "time" || mode == "all") TimeAll();
#endif
  return failures == 0 ? 0 : 1;
}
