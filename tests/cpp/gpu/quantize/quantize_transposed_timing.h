// Times the kernel that quantizes the rows of groups, transposed, beside a copy that moves as many
// bytes. Launches take turns on sets of random operands, each larger than the L2 cache.
#ifndef JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_TRANSPOSED_TIMING_H_
#define JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_TRANSPOSED_TIMING_H_

#include <cstdio>
#include <vector>

#include "tests/cpp/gpu/matmul/matmul_check.h"
#include "tests/cpp/gpu/quantize/row_blocks.h"
#include "tests/cpp/gpu/timing.h"

namespace harness {

inline void TimeTransposed(ElementType type, bool per_column, int64_t rows, int64_t columns,
                           const std::vector<int32_t>& sizes) {
  constexpr int kSets = 3;
  const RowBlocks blocks(sizes, rows);
  const int64_t scales = per_column ? columns : (columns + 127) / 128;
  const bool is_quantized = type == jax_ep::kF8E4M3;
  const int64_t x_scales = (columns + 127) / 128;
  const int64_t values_read = rows * columns * jax_ep::ElementBytes(type);
  const int64_t read = values_read + (is_quantized ? 4 * rows * x_scales : 0);
  const int64_t written = blocks.used * (128 * columns + 4 * scales);
  GuardedBuffer x[kSets], scale_of_x[kSets], values[kSets], scale[kSets], first_rows, num_rows;
  first_rows.Set(blocks.first_rows);
  num_rows.Set(blocks.num_rows);
  for (int i = 0; i < kSets; ++i) {
    x[i].Reset(values_read);
    if (is_quantized) {
      Require(cudaMemset(x[i].data(), 0x3c, values_read), "cudaMemset");
      scale_of_x[i].Reset(4 * rows * x_scales);
      ForEach(rows * x_scales,
              FillFunction{jax_ep::kF32, 2, scale_of_x[i].data(), rows * x_scales});
    } else {
      ForEach(rows * columns, FillFunction{type, 1, x[i].data(), rows * columns});
    }
    values[i].Reset(blocks.capacity() * columns * 128);
    scale[i].Reset(blocks.capacity() * scales * 4);
  }
  const double time = MedianTime([&](int i) {
    i %= kSets;
    const jax_ep::Status status =
        jax_ep::LaunchQuantizeTransposed({.type = type,
                                          .num_rows = rows,
                                          .columns = columns,
                                          .row_blocks = blocks.capacity(),
                                          .per_column = per_column,
                                          .min_amax = 1e-4f,
                                          .x = x[i].data(),
                                          .x_scales = scale_of_x[i].As<float>(),
                                          .x_scales_per_row = x_scales,
                                          .first_rows = first_rows.As<int32_t>(),
                                          .block_rows = num_rows.As<int32_t>(),
                                          .values = values[i].data(),
                                          .scales = scale[i].As<float>()},
                                         nullptr);
    if (!status.ok()) std::printf("FAIL %s\n", status.message.c_str());
  });
  // The copy goes from one half of its bytes to the other.
  const int64_t half = (read + written) / 2;
  GuardedBuffer copied;
  copied.Reset(2 * half);
  const double copy = MedianTime([&](int) {
    uint8_t* const data = copied.data();
    Require(cudaMemcpyAsync(data + half, data, half, cudaMemcpyDeviceToDevice, nullptr), "a copy");
  });
  std::printf(
      "TIME quantize_transposed %-4s %-10s %d x %d, %d groups: %7.1f us, %6.0f GB/s; a copy "
      "%7.1f us, %6.0f GB/s: %.2f\n",
      is_quantized ? "f8" : TypeName(type), per_column ? "per column" : "", int(rows), int(columns),
      int(sizes.size()), time, (read + written) / time * 1e-3, copy, 2 * half / copy * 1e-3,
      copy / time);
  std::fflush(stdout);
}

inline void TimeAll() {
  const std::vector<int32_t> even(64, 512);
  std::vector<int32_t> ragged;  // the same sum
  for (int i = 0; i < 64; ++i) ragged.push_back(512 + (i % 2 == 0 ? 1 : -1) * (i / 2 * 5 % 160));
  for (int64_t columns : {7168, 4096, 2048}) {
    for (bool per_column : {true, false}) {
      TimeTransposed(jax_ep::kBF16, per_column, 32768, columns, even);
      TimeTransposed(jax_ep::kBF16, per_column, 32768, columns, ragged);
    }
  }
  TimeTransposed(jax_ep::kF8E4M3, true, 32768, 7168, even);
  TimeTransposed(jax_ep::kF8E4M3, false, 32768, 7168, even);
  TimeTransposed(jax_ep::kF32, true, 32768, 2048, even);
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_TRANSPOSED_TIMING_H_
