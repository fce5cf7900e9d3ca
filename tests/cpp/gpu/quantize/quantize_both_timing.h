// Times the kernel that quantizes the rows of groups both as they are and transposed, beside the
// two kernels that it replaces and a copy of as many bytes as it moves. Launches take turns on sets
// of random operands, each larger than the L2 cache. The bits of one set are compared.
#ifndef JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_BOTH_TIMING_H_
#define JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_BOTH_TIMING_H_

#include <cstdio>
#include <vector>

#include "ffi/kernels/quantize/quantize.h"
#include "tests/cpp/gpu/matmul/matmul_check.h"
#include "tests/cpp/gpu/quantize/quantize_transposed_runner.h"
#include "tests/cpp/gpu/timing.h"

namespace harness {

class BothTiming {
 public:
  BothTiming(ElementType type, bool per_column, int64_t columns, const std::vector<int32_t>& sizes)
      : type_(type), per_column_(per_column), columns_(columns), blocks_(sizes, kRows) {
    first_rows_.Set(blocks_.first_rows);
    num_rows_.Set(blocks_.num_rows);
    for (int i = 0; i < kSets; ++i) {
      x_[i].Reset(kRows * columns * jax_ep::ElementBytes(type));
      ForEach(kRows * columns,
              FillFunction{type, 1 + static_cast<uint64_t>(i), x_[i].data(), kRows * columns});
      results_[i].Reset(*this);
    }
  }

  void Run(int num_groups) {
    const double both = MedianTime([&](int i) { Both(i % kSets, results_[i % kSets]); });
    const double rows = MedianTime([&](int i) { Rows(i % kSets, results_[i % kSets]); });
    const double transposed =
        MedianTime([&](int i) { Transposed(i % kSets, results_[i % kSets]); });
    const int64_t half = Bytes() / 2;
    GuardedBuffer copied;
    copied.Reset(2 * half);
    const double copy = MedianTime([&](int) {
      uint8_t* const data = copied.data();
      Require(cudaMemcpyAsync(data + half, data, half, cudaMemcpyDeviceToDevice, nullptr),
              "a copy");
    });
    std::printf(
        "TIME quantize_both %-4s %-10s %d x %d, %d groups: %7.1f us, %6.0f GB/s; rows %7.1f + "
        "transposed %7.1f us: %.2f of both; a copy %7.1f us: %.2f\n",
        TypeName(type_), per_column_ ? "per column" : "", int(kRows), int(columns_), num_groups,
        both, Bytes() / both * 1e-3, rows, transposed, both / (rows + transposed), copy,
        copy / both);
    std::fflush(stdout);
    CompareBits();
  }

 private:
  static constexpr int64_t kRows = 32768;
  static constexpr int kSets = 3;

  struct Results {
    GuardedBuffer row_values, row_scales, values, scales;

    void Reset(const BothTiming& of) {
      row_values.Reset(kRows * of.columns_);
      row_scales.Reset(kRows * of.column_blocks() * 4);
      values.Reset(of.blocks_.capacity() * of.columns_ * 128);
      scales.Reset(of.blocks_.capacity() * of.block_scales() * 4);
    }
  };

  int64_t column_blocks() const { return (columns_ + 127) / 128; }
  int64_t block_scales() const { return per_column_ ? columns_ : column_blocks(); }

  // Bytes that one pass moves; row blocks without rows are not written.
  int64_t Bytes() const {
    return kRows * (columns_ * (jax_ep::ElementBytes(type_) + 1) + 4 * column_blocks()) +
           blocks_.used * (128 * columns_ + 4 * block_scales());
  }

  void Transpose(int i, const Results& to, bool with_rows) const {
    const jax_ep::Status status =
        jax_ep::LaunchQuantizeTransposed({.type = type_,
                                          .num_rows = kRows,
                                          .columns = columns_,
                                          .row_blocks = blocks_.capacity(),
                                          .per_column = per_column_,
                                          .min_amax = 1e-4f,
                                          .power_of_two_scales = false,
                                          .x = x_[i].data(),
                                          .first_rows = first_rows_.As<int32_t>(),
                                          .block_rows = num_rows_.As<int32_t>(),
                                          .values = to.values.data(),
                                          .scales = to.scales.As<float>(),
                                          .row_values = with_rows ? to.row_values.data() : nullptr,
                                          .row_scales = to.row_scales.As<float>()},
                                         nullptr);
    if (!status.ok()) std::printf("FAIL %s\n", status.message.c_str());
  }

  void Both(int i, const Results& to) const { Transpose(i, to, true); }
  void Transposed(int i, const Results& to) const { Transpose(i, to, false); }

  void Rows(int i, const Results& to) const {
    const jax_ep::Status status = jax_ep::LaunchQuantize({.kind = QuantizeKind::kBlock128,
                                                          .type = type_,
                                                          .num_rows = kRows,
                                                          .columns = columns_,
                                                          .min_amax = 1e-4f,
                                                          .power_of_two_scales = false,
                                                          .x = x_[i].data(),
                                                          .values = to.row_values.data(),
                                                          .scales = to.row_scales.As<float>()},
                                                         nullptr);
    if (!status.ok()) std::printf("FAIL %s\n", status.message.c_str());
  }

  // All rows are in groups, and what no kernel writes has the same bits in both.
  void CompareBits() {
    Results& both = results_[0];
    Results& two = results_[1];
    for (Results* results : {&both, &two}) results->Reset(*this);
    Both(0, both);
    Rows(0, two);
    Transposed(0, two);
    Require(cudaDeviceSynchronize(), "the kernels");
    const bool equal = both.row_values.Bytes() == two.row_values.Bytes() &&
                       both.row_scales.Bytes() == two.row_scales.Bytes() &&
                       both.values.Bytes() == two.values.Bytes() &&
                       both.scales.Bytes() == two.scales.Bytes();
    if (equal) return;
    std::printf("FAIL quantize_both: the bits are not those of the two kernels\n");
    ++failures;
  }

  ElementType type_;
  bool per_column_;
  int64_t columns_;
  RowBlocks blocks_;
  GuardedBuffer first_rows_, num_rows_, x_[kSets];
  Results results_[kSets];
};

inline void TimeBoth() {
  const std::vector<int32_t> even(64, 512);
  std::vector<int32_t> ragged;  // the same sum
  for (int i = 0; i < 64; ++i) ragged.push_back(512 + (i % 2 == 0 ? 1 : -1) * (i / 2 * 5 % 160));
  for (int64_t columns : {4096, 7168, 2048}) {
    for (const std::vector<int32_t>& sizes : {even, ragged}) {
      BothTiming(jax_ep::kBF16, false, columns, sizes).Run(64);
    }
  }
  BothTiming(jax_ep::kBF16, true, 4096, ragged).Run(64);
  BothTiming(jax_ep::kBF16, false, 4096, std::vector<int32_t>(16, 2048)).Run(16);
  BothTiming(jax_ep::kF32, false, 4096, ragged).Run(64);
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_BOTH_TIMING_H_
