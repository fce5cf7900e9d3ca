// Compares the kernel that quantizes rows with loops over numbers, bit by bit, on the current GPU.
//
//   quantize_test [MODE]
//
//   check   every check
//   small   small checks, each buffer an allocation of its own: for compute-sanitizer
//   time    GB/s beside a copy of as many bytes
//   all     check, then time (the default)
#include <cstdio>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/cpp/gpu/guarded_buffer.h"
#include "tests/cpp/gpu/quantize/quantize_inputs.h"
#include "tests/cpp/gpu/quantize/quantize_reference.h"

namespace harness {
namespace {

using jax_ep::kBF16;
using jax_ep::kF16;
using jax_ep::kF32;
using jax_ep::Quantize;

struct QuantizeCase {
  ElementType type;
  QuantizeKind kind;
  bool power_of_two_scales;
  int64_t rows;
  int64_t columns;
  int64_t offset = 0;  // elements by which x begins after an aligned address

  std::string Name() const {
    char text[128];
    std::snprintf(text, sizeof text, "%s %s%s %d x %d + %d", TypeName(type),
                  kind == QuantizeKind::kBlock128 ? "block128"
                  : kind == QuantizeKind::kRow    ? "row"
                                                  : "row_e5m2",
                  power_of_two_scales ? " powers" : "", int(rows), int(columns), int(offset));
    return text;
  }
};

float MinAmax(QuantizeKind kind) { return kind == QuantizeKind::kBlock128 ? 1e-4f : 1e-30f; }

// Rows of very different magnitudes. Some are zeros, are so small that the least magnitude counts,
// have only halves and integers, or one value that is no number.
std::vector<float> Numbers(const QuantizeCase& c) {
  std::mt19937 random(static_cast<unsigned>(c.columns * 8 + c.rows));
  std::normal_distribution<float> normal;
  std::vector<float> numbers;
  for (int64_t row = 0; row < c.rows; ++row) {
    const float magnitude = row % 8 == 2   ? 0.0f
                            : row % 8 == 3 ? 1e-6f
                                           : std::ldexp(1.0f, static_cast<int>(random() % 20) - 10);
    for (int64_t i = 0; i < c.columns; ++i) {
      const bool is_exact = row % 8 == 4;  // with 448 the scale is one, and there are ties
      numbers.push_back(!is_exact      ? magnitude * normal(random)
                        : i % 128 == 0 ? 448.0f
                                       : 0.5f * static_cast<float>(random() % 64) - 16);
    }
    const float bad[] = {std::nanf(""), std::numeric_limits<float>::infinity()};
    if (row % 8 >= 6) numbers[row * c.columns + random() % c.columns] = bad[row % 2];
  }
  return numbers;
}

// One call, with its operands and results on the GPU.
class QuantizeRunner {
 public:
  explicit QuantizeRunner(const QuantizeCase& c) : c_(c), numbers_(Numbers(c)) {
    const std::vector<uint8_t> bytes = Round(c.type, &numbers_);
    x_.Reset(bytes.size(), c.offset * jax_ep::ElementBytes(c.type));
    Require(cudaMemcpy(x_.data(), bytes.data(), bytes.size(), cudaMemcpyHostToDevice), "x");
    num_scales_ = c.kind == QuantizeKind::kBlock128 ? (c.columns + 127) / 128 : 1;
    values_.Reset(c.rows * c.columns);
    scales_.Reset(c.rows * num_scales_ * 4);
    call_ = {.kind = c.kind,
             .type = c.type,
             .num_rows = c.rows,
             .columns = c.columns,
             .min_amax = MinAmax(c.kind),
             .power_of_two_scales = c.power_of_two_scales,
             .x = x_.data(),
             .values = values_.data(),
             .scales = scales_.As<float>()};
  }

  // Returns what is wrong with the results, or "".
  std::string Run() {
    const jax_ep::Status status = jax_ep::LaunchQuantize(call_, Stream());
    if (!status.ok()) return status.message;
    Require(cudaStreamSynchronize(Stream()), "the kernel");
    if (!values_.GuardsAreIntact() || !scales_.GuardsAreIntact()) {
      return "a store out of bounds";
    }
    const std::vector<uint8_t> values = values_.Bytes();
    const std::vector<uint8_t> scales = scales_.Bytes();
    for (int64_t row = 0; row < c_.rows; ++row) {
      const QuantizedRow expected = ReferenceRow(call_, &numbers_[row * c_.columns]);
      const uint8_t* const got = &values[row * c_.columns];
      for (int64_t i = 0; i < c_.columns; ++i) {
        if (Canonical(got[i]) != Canonical(expected.values[i])) {
          return At("value", row, i, got[i], expected.values[i]);
        }
      }
      for (int64_t i = 0; i < num_scales_; ++i) {
        float scale;
        std::memcpy(&scale, &scales[4 * (row * num_scales_ + i)], 4);
        const float wanted = expected.scales[i];
        const bool both_nan = std::isnan(scale) && std::isnan(wanted);
        if (!both_nan && Bits(scale) != Bits(wanted)) {
          return At("scale", row, i, scale, wanted);
        }
      }
    }
    return "";
  }

 private:
  uint8_t Canonical(uint8_t code) const {
    return harness::Canonical(c_.kind == QuantizeKind::kRowE5M2, code);
  }

  static std::string At(const char* what, int64_t row, int64_t i, double got, double expected) {
    char text[128];
    std::snprintf(text, sizeof text, "%s %d of row %d is %.9g; expected %.9g", what, int(i),
                  int(row), got, expected);
    return text;
  }

  QuantizeCase c_;
  std::vector<float> numbers_;
  GuardedBuffer x_, values_, scales_;
  Quantize call_;
  int64_t num_scales_;
};

template <typename Function>
void ForEachFormat(const Function& function) {
  for (ElementType type : {kBF16, kF16, kF32}) {
    for (QuantizeKind kind :
         {QuantizeKind::kBlock128, QuantizeKind::kRow, QuantizeKind::kRowE5M2}) {
      for (bool power_of_two_scales : {false, true}) {
        function(QuantizeCase{type, kind, power_of_two_scales, 0, 0});
      }
    }
  }
}

void Check(const std::vector<std::pair<int64_t, int64_t>>& shapes) {
  CaseCount count;
  ForEachFormat([&](QuantizeCase c) {
    for (const auto& [rows, columns] : shapes) {
      for (int64_t offset : {0, 1}) {
        c.rows = rows, c.columns = columns, c.offset = offset;
        count.Add(c.Name(), QuantizeRunner(c).Run());
      }
    }
  });
  count.Finish("quantize");
}

}  // namespace
}  // namespace harness

#ifndef JAX_EP_EMULATION  // a CPU's times say nothing
#include "tests/cpp/gpu/quantize/quantize_timing.h"
#endif

int main(int argc, char** argv) {
  using namespace harness;
  const std::string_view mode = argc > 1 ? argv[1] : "all";
  // Around a vector, a scale's values, and a tile of a block's threads: 8192 values of 16 bits.
  if (mode == "small") {
    GuardedBuffer::exact = true;
    Check({{8, 1}, {8, 136}, {9, 300}, {8, 1032}});
  } else if (mode != "time") {
    Check({{1, 1},
           {8, 7},
           {8, 8},
           {9, 127},
           {16, 128},
           {8, 129},
           {8, 384},
           {8, 1001},
           {8, 2048},
           {17, 7168},
           {8, 8192},
           {8, 8200},
           {8, 9001},
           {8, 20000}});
  }
#ifndef JAX_EP_EMULATION
  if (mode == "time" || mode == "all") TimeAll();
#endif
  return failures == 0 ? 0 : 1;
}
