// Times FP8 weight gradients, with and without the passes that quantize and transpose their
// operands, beside those of bfloat16. All launches of a shape take turns, on two sets of operands;
// each is larger than the L2 cache.
#ifndef JAX_EP_TESTS_CPP_GPU_MATMUL_FP8_RHS_GRADIENT_TIMING_H_
#define JAX_EP_TESTS_CPP_GPU_MATMUL_FP8_RHS_GRADIENT_TIMING_H_

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <vector>

#include "ffi/kernels/quantize/quantize_transposed.h"
#include "tests/cpp/gpu/matmul/fp8_rhs_gradient_runner.h"
#include "tests/cpp/gpu/matmul/matmul_timing.h"

namespace harness {

// Rows and cotangents in bfloat16, quantized into the operands of an FP8 weight gradient.
class TransposedOperands {
 public:
  TransposedOperands(const Fp8GradientCase& c, const Fp8GradientRunner& gradient)
      : case_(c), gradient_(gradient) {
    const RowBlocks blocks(c.sizes, c.m);
    first_rows_.Set(blocks.first_rows);
    num_rows_.Set(blocks.num_rows);
    for (auto [x, columns, seed] : {Operand{&lhs_, c.k, 1}, {&cotangents_, c.n, 2}}) {
      x->Reset(c.m * columns * 2);
      ForEach(c.m * columns, FillFunction{kBF16, seed, x->data(), c.m * columns});
    }
  }

  void Launch() const {
    Launch(lhs_, case_.k, true, gradient_.a(), gradient_.a_scales());
    Launch(cotangents_, case_.n, false, gradient_.b(), gradient_.b_scales());
  }

 private:
  struct Operand {
    GuardedBuffer* x;
    int64_t columns;
    uint64_t seed;
  };

  void Launch(const GuardedBuffer& x, int64_t columns, bool per_column, uint8_t* values,
              float* scales) const {
    const jax_ep::Status status =
        jax_ep::LaunchQuantizeTransposed({.type = kBF16,
                                          .num_rows = case_.m,
                                          .columns = columns,
                                          .row_blocks = gradient_.row_blocks(),
                                          .per_column = per_column,
                                          .min_amax = 1e-30f,
                                          .x = x.data(),
                                          .first_rows = first_rows_.As<int32_t>(),
                                          .block_rows = num_rows_.As<int32_t>(),
                                          .values = values,
                                          .scales = scales},
                                         nullptr);
    if (!status.ok()) std::printf("FAIL %s\n", status.message.c_str());
  }

  Fp8GradientCase case_;
  const Fp8GradientRunner& gradient_;
  GuardedBuffer first_rows_, num_rows_, lhs_, cotangents_;
};

// Returns the milliseconds of each launch, which are called `count` times in a row.
inline float BatchTime(const std::function<void(int)>& launch, int count) {
  cudaEvent_t begin, end;
  Require(cudaEventCreate(&begin), "an event");
  Require(cudaEventCreate(&end), "an event");
  Require(cudaEventRecord(begin), "an event");
  for (int i = 0; i < count; ++i) launch(i);
  Require(cudaEventRecord(end), "an event");
  Require(cudaEventSynchronize(end), "the kernels");
  float milliseconds = 0;
  Require(cudaEventElapsedTime(&milliseconds, begin, end), "an event");
  Require(cudaEventDestroy(begin), "an event");
  Require(cudaEventDestroy(end), "an event");
  return milliseconds / static_cast<float>(count);
}

inline void TimeGradient(int64_t m, int64_t k, int64_t n, const std::vector<int32_t>& sizes,
                         const char* groups, bool accumulates) {
  constexpr int kSets = 2;
  const Fp8GradientCase c{Numbers::kRandom, accumulates, accumulates, m, k, n, sizes};
  std::vector<std::unique_ptr<Fp8GradientRunner>> gradients;
  std::vector<std::unique_ptr<TransposedOperands>> operands;
  std::vector<std::unique_ptr<Runner>> bfloat16;
  for (int i = 0; i < kSets; ++i) {
    gradients.push_back(std::make_unique<Fp8GradientRunner>(c));
    operands.push_back(std::make_unique<TransposedOperands>(c, *gradients[i]));
    operands[i]->Launch();
    bfloat16.push_back(
        std::make_unique<Runner>(Case{.kind = accumulates ? kAccumulation : kRhsGradient,
                                      .m = m,
                                      .k = k,
                                      .n = n,
                                      .sizes = sizes}));
  }
  const double matrices = static_cast<double>(sizes.size()) * k * n;
  const size_t copied = static_cast<size_t>(matrices) * (accumulates ? 4 : 2);
  GuardedBuffer copy_from, copy_to;
  copy_from.Reset(copied);
  copy_to.Reset(copied);
  const std::vector<std::function<void(int)>> launches = {
      [&](int i) { static_cast<void>(bfloat16[i % kSets]->Launch()); },
      [&](int i) { static_cast<void>(gradients[i % kSets]->Launch()); },
      [&](int i) {
        operands[i % kSets]->Launch();
        static_cast<void>(gradients[i % kSets]->Launch());
      },
      [&](int i) { operands[i % kSets]->Launch(); },
      [&](int) {
        Require(cudaMemcpyAsync(copy_to.data(), copy_from.data(), copied, cudaMemcpyDeviceToDevice,
                                nullptr),
                "a copy");
      }};
  const int count = std::max(2, static_cast<int>(60 / BatchTime(launches[0], 2)));
  std::vector<std::vector<float>> times(launches.size());
  for (int round = 0; round < 5; ++round) {
    for (size_t i = 0; i < launches.size(); ++i) {
      times[i].push_back(BatchTime(launches[i], count));
    }
  }
  std::vector<double> median;
  for (std::vector<float>& of_launch : times) {
    std::sort(of_launch.begin(), of_launch.end());
    median.push_back(of_launch[of_launch.size() / 2]);
  }
  const double rows = static_cast<double>(Rows(sizes, m).end);
  const double flops = 2.0 * rows * k * n;
  const double bytes = matrices * (accumulates ? 8 : 2) + rows * (k + n);
  std::printf("TIME %s K=%d N=%d %d groups %s:", c.Name().c_str(), int(k), int(n),
              int(sizes.size()), groups);
  std::printf(" bf16 %.3f ms %.0f TFLOP/s; fp8 %.3f ms %.0f TFLOP/s %.2f TB/s (%.2f x);", median[0],
              flops / median[0] * 1e-9, median[1], flops / median[1] * 1e-9,
              bytes / median[1] * 1e-9, median[0] / median[1]);
  std::printf(" with transposes %.3f ms (%.2f x); transposes %.3f ms %.2f TB/s; a copy %.2f TB/s\n",
              median[2], median[0] / median[2], median[3], 3 * rows * (k + n) / median[3] * 1e-9,
              2.0 * copied / median[4] * 1e-9);
  std::fflush(stdout);
}

inline void TimeGradients() {
  const auto even = [](int64_t rows, int groups) {
    return std::vector<int32_t>(groups, static_cast<int32_t>(rows / groups));
  };
  {
    const Fp8GradientRunner warm_up(
        {Numbers::kRandom, false, false, 32768, 2048, 7168, even(32768, 16)});
    const auto start = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - start < std::chrono::seconds(4)) {
      for (int i = 0; i < 50; ++i) static_cast<void>(warm_up.Launch());
      Require(cudaDeviceSynchronize(), "the kernels");
    }
  }
  for (bool accumulates : {false, true}) {
    TimeGradient(32768, 7168, 4096, even(32768, 64), "even", accumulates);
    TimeGradient(32768, 2048, 7168, even(32768, 64), "even", accumulates);
    TimeGradient(32768, 7168, 4096, Draw(32768, 64, 0), "multinomial", accumulates);
    TimeGradient(32768, 7168, 4096, even(32768, 16), "even", accumulates);  // 2048 rows each
    TimeGradient(32768, 2048, 7168, even(32768, 16), "even", accumulates);
  }
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MATMUL_FP8_RHS_GRADIENT_TIMING_H_
