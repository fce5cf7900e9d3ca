// Compares the kernel that quantizes matrices with loops over numbers, bit by bit, on the current
// GPU.
//
//   quantize_weights_test [MODE]
//
//   check   every check
//   small   small checks, each buffer an allocation of its own: for compute-sanitizer
//   time    GB/s beside a copy of as many bytes
//   all     check, then time (the default)
#include <cstdio>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/cpp/gpu/guarded_buffer.h"
#include "tests/cpp/gpu/quantize/quantize_inputs.h"
#include "tests/cpp/gpu/quantize/quantize_weights_reference.h"

namespace harness {
namespace {

using jax_ep::kBF16;
using jax_ep::kF16;
using jax_ep::kF32;
using jax_ep::QuantizeWeights;

struct WeightsCase {
  ElementType type;
  bool power_of_two_scales;
  bool as_given;
  bool transposed;
  int64_t matrices;
  int64_t rows;
  std::vector<int64_t> parts;  // columns of each call
  int64_t offset = 0;          // elements by which x begins after an aligned address

  int64_t columns() const { return std::accumulate(parts.begin(), parts.end(), int64_t{0}); }

  std::string Name() const {
    char text[128];
    std::snprintf(text, sizeof text, "%s%s%s%s %d x %d x %d in %d + %d", TypeName(type),
                  power_of_two_scales ? " powers" : "", as_given ? " as given" : "",
                  transposed ? " transposed" : "", int(matrices), int(rows), int(columns()),
                  int(parts.size()), int(offset));
    return text;
  }
};

// Blocks of very different magnitudes. Some are zeros, are so small that the least magnitude
// counts, have only halves and integers, or one value that is no number.
std::vector<float> Numbers(const WeightsCase& c) {
  const int64_t columns = c.columns();
  std::mt19937 random(static_cast<unsigned>(columns * 8 + c.rows));
  std::normal_distribution<float> normal;
  std::vector<float> numbers(c.matrices * c.rows * columns);
  const int64_t row_blocks = (c.rows + 127) / 128, column_blocks = (columns + 127) / 128;
  std::vector<int> exponents(c.matrices * row_blocks * column_blocks);
  for (int& exponent : exponents) exponent = static_cast<int>(random() % 20) - 10;
  for (int64_t i = 0; i < c.matrices * c.rows; ++i) {
    const int64_t row = i % c.rows;
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t block = (i / c.rows * row_blocks + row / 128) * column_blocks + column / 128;
      float& number = numbers[i * columns + column];
      number = block % 8 == 2   ? 0.0f
               : block % 8 == 3 ? 1e-6f * normal(random)
               : block % 8 == 4 ? 0.5f * static_cast<float>(random() % 64) - 16
                                : std::ldexp(normal(random), exponents[block]);
      const bool is_last = row % 128 == 127 || row == c.rows - 1;
      if (block % 8 == 4 && row % 128 == 0 && column % 128 == 0) number = 448;  // the scale is 1
      if (block % 8 == 6 && is_last && column % 128 == 5) number = std::nanf("");
      if (block % 8 == 7 && row % 128 == 3) number = -std::numeric_limits<float>::infinity();
    }
  }
  return numbers;
}

// The calls of a case, with their operands and results on the GPU.
class WeightsRunner {
 public:
  explicit WeightsRunner(const WeightsCase& c) : c_(c), numbers_(Numbers(c)) {
    static_cast<void>(Round(c.type, &numbers_));
    const int64_t row_blocks = (c.rows + 127) / 128, column_blocks = (c.columns() + 127) / 128;
    for (Layout* layout : {&as_given_, &transposed_}) {
      layout->values.Reset(numbers_.size());
      layout->scales.Reset(c.matrices * row_blocks * column_blocks * 4);
    }
    call_ = {.type = c.type,
             .num_matrices = c.matrices,
             .rows = c.rows,
             .min_amax = 1e-4f,
             .power_of_two_scales = c.power_of_two_scales};
  }

  // Returns what is wrong with the results, or "".
  std::string Run() {
    jax_ep::WeightLayouts layouts = {.total_columns = c_.columns()};
    if (c_.as_given) layouts.as_given = as_given_.Arrays();
    if (c_.transposed) layouts.transposed = transposed_.Arrays();
    for (int64_t columns : c_.parts) {
      GuardedBuffer x;
      Upload(layouts.first_column, columns, &x);
      call_.columns = columns;
      call_.x = x.data();
      const jax_ep::Status status = jax_ep::LaunchQuantizeWeights(call_, layouts, Stream());
      if (!status.ok()) return status.message;
      Require(cudaStreamSynchronize(Stream()), "the kernel");
      layouts.first_column += columns;
    }
    const std::string problem = c_.as_given ? Compare(as_given_, false) : Untouched(as_given_);
    if (!problem.empty()) return problem;
    return c_.transposed ? Compare(transposed_, true) : Untouched(transposed_);
  }

 private:
  struct Layout {
    GuardedBuffer values, scales;

    jax_ep::LayoutArrays Arrays() const {
      return {values.data(), reinterpret_cast<float*>(scales.data())};
    }
  };

  // Copies some columns of all matrices to the GPU.
  void Upload(int64_t first, int64_t columns, GuardedBuffer* x) const {
    std::vector<float> part;
    for (int64_t row = 0; row < c_.matrices * c_.rows; ++row) {
      const float* const begin = &numbers_[row * c_.columns() + first];
      part.insert(part.end(), begin, begin + columns);
    }
    const std::vector<uint8_t> bytes = Round(c_.type, &part);
    x->Reset(bytes.size(), c_.offset * jax_ep::ElementBytes(c_.type));
    Require(cudaMemcpy(x->data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "x");
  }

  static std::string Untouched(const Layout& layout) {
    for (const GuardedBuffer* buffer : {&layout.values, &layout.scales}) {
      for (uint8_t byte : buffer->Bytes()) {
        if (byte != 0xff) return "a layout is written that was not asked for";
      }
    }
    return "";
  }

  std::string Compare(const Layout& layout, bool transpose) const {
    const char* const name = transpose ? "transposed" : "as given";
    if (!layout.values.GuardsAreIntact() || !layout.scales.GuardsAreIntact()) {
      return std::string("a store out of bounds, ") + name;
    }
    const std::vector<uint8_t> values = layout.values.Bytes();
    const std::vector<uint8_t> scales = layout.scales.Bytes();
    const int64_t columns = c_.columns(), size = c_.rows * columns;
    for (int64_t m = 0; m < c_.matrices; ++m) {
      QuantizedMatrix expected = ReferenceMatrix(call_, &numbers_[m * size], c_.rows, columns);
      const auto num_scales = static_cast<int64_t>(expected.scales.size());
      if (transpose) {
        expected.values = Transposed(expected.values, c_.rows, columns);
        expected.scales = Transposed(expected.scales, (c_.rows + 127) / 128, (columns + 127) / 128);
      }
      for (int64_t i = 0; i < size; ++i) {
        const uint8_t got = values[m * size + i];
        if (Canonical(false, got) != Canonical(false, expected.values[i])) {
          return At("value", name, m, i, got, expected.values[i]);
        }
      }
      for (int64_t i = 0; i < num_scales; ++i) {
        float scale;
        std::memcpy(&scale, &scales[4 * (m * num_scales + i)], 4);
        const float wanted = expected.scales[i];
        const bool both_nan = std::isnan(scale) && std::isnan(wanted);
        if (!both_nan && Bits(scale) != Bits(wanted)) return At("scale", name, m, i, scale, wanted);
      }
    }
    return "";
  }

  static std::string At(const char* what, const char* layout, int64_t matrix, int64_t i, double got,
                        double expected) {
    char text[128];
    std::snprintf(text, sizeof text, "%s %d of matrix %d, %s, is %.9g; expected %.9g", what, int(i),
                  int(matrix), layout, got, expected);
    return text;
  }

  WeightsCase c_;
  std::vector<float> numbers_;
  Layout as_given_, transposed_;
  QuantizeWeights call_;
};

struct Shape {
  int64_t matrices, rows;
  std::vector<int64_t> parts;
};

void Check(const std::vector<Shape>& shapes) {
  CaseCount count;
  const auto run = [&](const WeightsCase& c) { count.Add(c.Name(), WeightsRunner(c).Run()); };
  for (ElementType type : {kBF16, kF16, kF32}) {
    for (const auto& [matrices, rows, parts] : shapes) {
      WeightsCase both{type, false, true, true, matrices, rows, parts};
      run(both);
      both.power_of_two_scales = true;
      run(both);
      both.offset = 1;
      run(both);
      run({type, false, true, false, matrices, rows, parts});
      run({type, false, false, true, matrices, rows, parts});
    }
  }
  count.Finish("quantize_weights");
}

}  // namespace
}  // namespace harness

#ifndef JAX_EP_EMULATION  // a CPU's times say nothing
#include "tests/cpp/gpu/quantize/quantize_weights_timing.h"
#endif

int main(int argc, char** argv) {
  using namespace harness;
  const std::string_view mode = argc > 1 ? argv[1] : "all";
  if (mode == "small") {
    GuardedBuffer::exact = true;
    // Whole blocks in two parts; partial blocks with aligned and with unaligned rows.
    Check({{2, 128, {128, 128}}, {1, 272, {144}}, {2, 130, {7}}});
  } else if (mode != "time") {
    Check({{1, 1, {1}},
           {2, 128, {128}},
           {3, 384, {256}},
           {2, 256, {128, 256}},
           {2, 160, {128, 40}},
           {2, 136, {264}},
           {2, 16, {24}},
           {2, 129, {300}},
           {1, 1001, {999}},
           {2, 512, {1024, 1024}}});
  }
#ifndef JAX_EP_EMULATION
  if (mode == "time" || mode == "all") TimeAll();
#endif
  return failures == 0 ? 0 : 1;
}
