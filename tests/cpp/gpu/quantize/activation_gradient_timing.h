// Times the kernel that quantizes gradients of gated activations, beside the kernels that quantize
// them in bfloat16 and a copy of as many bytes. Launches take turns on sets of random operands,
// each larger than the L2 cache.
#ifndef JAX_EP_TESTS_CPP_GPU_QUANTIZE_ACTIVATION_GRADIENT_TIMING_H_
#define JAX_EP_TESTS_CPP_GPU_QUANTIZE_ACTIVATION_GRADIENT_TIMING_H_

#include <cstdio>
#include <vector>

#include "ffi/kernels/quantize/quantize.h"
#include "tests/cpp/gpu/quantize/activation_gradient_runner.h"
#include "tests/cpp/gpu/timing.h"

namespace harness {

inline void TimeActivationGradient(int64_t rows, int64_t columns,
                                   const std::vector<int32_t>& sizes) {
  constexpr int kSets = 3;
  const ActivationCase c = {.rows = rows, .columns = columns, .sizes = sizes};
  const RowBlocks blocks(sizes, rows);
  ActivationOperands operands[kSets];
  ActivationResults results[kSets];
  GuardedBuffer first_rows, num_rows;
  first_rows.Set(blocks.first_rows);
  num_rows.Set(blocks.num_rows);
  for (int i = 0; i < kSets; ++i) {
    operands[i].Reset(c, rows, 3 * i);
    results[i].Reset(c, blocks);
  }
  const auto check = [](const jax_ep::Status& status) {
    if (!status.ok()) std::printf("FAIL %s\n", status.message.c_str());
  };
  const double fused = MedianTime([&](int i) {
    i %= kSets;
    check(jax_ep::LaunchQuantizeActivationGradient(
        ActivationCall(c, operands[i], first_rows, num_rows, blocks.capacity(), results[i]),
        nullptr));
  });
  // Quantizes the pre-activation, which has the shape of its gradient, and as many activations.
  const auto transpose = [&](int i, bool of_activations, bool with_rows) {
    i %= kSets;
    check(jax_ep::LaunchQuantizeTransposed(
        {.type = kBF16,
         .num_rows = rows,
         .columns = of_activations ? columns : 2 * columns,
         .row_blocks = blocks.capacity(),
         .per_column = of_activations,
         .min_amax = 1e-4f,
         .power_of_two_scales = false,
         .x = of_activations ? operands[i].gradient.data() : operands[i].pre_activation.data(),
         .first_rows = first_rows.As<int32_t>(),
         .block_rows = num_rows.As<int32_t>(),
         .values = of_activations ? results[i].activation_values.data() : results[i].values.data(),
         .scales = of_activations ? results[i].activation_scales.As<float>()
                                  : results[i].scales.As<float>(),
         .row_values = with_rows ? results[i].row_values.data() : nullptr,
         .row_scales = results[i].row_scales.As<float>()},
        nullptr));
  };
  const double as_rows = MedianTime([&](int i) {
    i %= kSets;
    check(jax_ep::LaunchQuantize({.kind = jax_ep::QuantizeKind::kBlock128,
                                  .type = kBF16,
                                  .num_rows = rows,
                                  .columns = 2 * columns,
                                  .min_amax = 1e-4f,
                                  .power_of_two_scales = false,
                                  .x = operands[i].pre_activation.data(),
                                  .values = results[i].row_values.data(),
                                  .scales = results[i].row_scales.As<float>()},
                                 nullptr));
  });
  const double transposed = MedianTime([&](int i) { transpose(i, false, false); });
  const double both = MedianTime([&](int i) { transpose(i, false, true); });
  const double activations = MedianTime([&](int i) { transpose(i, true, false); });
  const int64_t bytes = rows * (8 * columns + 4 * (3 * columns / 128)) +
                        blocks.used * (3 * 128 * columns + 4 * (columns + 2 * columns / 128));
  GuardedBuffer copied;
  copied.Reset(bytes);
  const double copy = MedianTime([&](int) {
    uint8_t* const data = copied.data();
    Require(cudaMemcpyAsync(data + bytes / 2, data, bytes / 2, cudaMemcpyDeviceToDevice, nullptr),
            "a copy");
  });
  std::printf(
      "TIME quantize_activation_gradient %d x %d, %d groups: %7.1f us, %6.0f GB/s; a copy %7.1f "
      "us: %.2f; of bfloat16 gradients: rows %.1f, transposed %.1f, both %.1f, activations %.1f\n",
      int(rows), int(columns), int(sizes.size()), fused, bytes / fused * 1e-3, copy, copy / fused,
      as_rows, transposed, both, activations);
  std::fflush(stdout);
}

inline void TimeAll() {
  const std::vector<int32_t> even(64, 512);
  std::vector<int32_t> ragged;  // the same sum
  for (int i = 0; i < 64; ++i) ragged.push_back(512 + (i % 2 == 0 ? 1 : -1) * (i / 2 * 5 % 160));
  TimeActivationGradient(32768, 2048, even);
  TimeActivationGradient(32768, 2048, ragged);
  TimeActivationGradient(32768, 2048, std::vector<int32_t>(16, 2048));
  TimeActivationGradient(32768, 768, ragged);
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_QUANTIZE_ACTIVATION_GRADIENT_TIMING_H_
