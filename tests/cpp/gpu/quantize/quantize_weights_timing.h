// Times the kernel that quantizes matrices, beside a copy that moves as many bytes. The matrices
// are larger than the L2 cache.
#ifndef JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_WEIGHTS_TIMING_H_
#define JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_WEIGHTS_TIMING_H_

#include <algorithm>
#include <cstdio>

#include "tests/cpp/gpu/guarded_buffer.h"
#include "tests/cpp/gpu/quantize/quantize_inputs.h"
#include "tests/cpp/gpu/quantize/quantize_weights_reference.h"
#include "tests/cpp/gpu/timing.h"

namespace harness {

inline void TimeWeights(ElementType type, bool as_given, bool transposed, int64_t matrices,
                        int64_t rows, int64_t columns) {
  const int64_t values = matrices * rows * columns;
  const int64_t scales = matrices * ((rows + 127) / 128) * ((columns + 127) / 128);
  const int64_t element = jax_ep::ElementBytes(type);
  const int64_t bytes =
      values * element + (int{as_given} + int{transposed}) * (values + 4 * scales);
  GuardedBuffer x, results;
  x.Reset(values * element);
  Require(cudaMemset(x.data(), 0x3c, values * element), "cudaMemset");
  const int64_t scale_bytes = (4 * scales + 255) / 256 * 256;
  results.Reset(2 * (values + scale_bytes));
  const auto arrays = [&](bool is_written, int64_t index) -> jax_ep::LayoutArrays {
    if (!is_written) return {};
    uint8_t* const first = results.data() + index * (values + scale_bytes);
    return {first + scale_bytes, reinterpret_cast<float*>(first)};
  };
  const jax_ep::WeightLayouts layouts = {.as_given = arrays(as_given, 0),
                                         .transposed = arrays(transposed, 1),
                                         .total_columns = columns};
  const jax_ep::QuantizeWeights call = {.type = type,
                                        .num_matrices = matrices,
                                        .rows = rows,
                                        .columns = columns,
                                        .min_amax = 1e-4f,
                                        .power_of_two_scales = false,
                                        .x = x.data()};
  const double time = MedianTime([&](int) {
    const jax_ep::Status status = jax_ep::LaunchQuantizeWeights(call, layouts, nullptr);
    if (!status.ok()) std::printf("FAIL %s\n", status.message.c_str());
  });
  // From x to the results, as many bytes as both may have: the rate counts.
  const int64_t copied = std::min(values * element, 2 * values);
  const double copy = MedianTime([&](int) {
    Require(cudaMemcpyAsync(results.data(), x.data(), copied, cudaMemcpyDeviceToDevice, nullptr),
            "a copy");
  });
  const double rate = bytes / time * 1e-3, copy_rate = 2 * copied / copy * 1e-3;
  std::printf("%-4s %-8s %-10s %3d x %d x %d: %7.1f us, %6.0f GB/s; a copy %6.0f GB/s: %.2f\n",
              TypeName(type), as_given ? "as given" : "", transposed ? "transposed" : "",
              int(matrices), int(rows), int(columns), time, rate, copy_rate, rate / copy_rate);
  std::fflush(stdout);
}

inline void TimeAll() {
  const struct {
    int64_t matrices, rows, columns;
  } shapes[] = {{64, 7168, 4096}, {64, 2048, 7168}, {32, 2048, 1536}};
  for (const auto& [matrices, rows, columns] : shapes) {
    TimeWeights(jax_ep::kBF16, true, true, matrices, rows, columns);
    TimeWeights(jax_ep::kBF16, true, false, matrices, rows, columns);
    TimeWeights(jax_ep::kBF16, false, true, matrices, rows, columns);
  }
  TimeWeights(jax_ep::kF32, true, true, 32, 2048, 7168);
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_WEIGHTS_TIMING_H_
