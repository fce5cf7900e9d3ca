// Times the kernel that quantizes rows, beside a copy that moves as many bytes. Launches take turns
// on several sets of operands, so that none finds its own in the L2 cache.
#ifndef JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_TIMING_H_
#define JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_TIMING_H_

#include <cstdio>
#include <memory>
#include <vector>

#include "tests/cpp/gpu/guarded_buffer.h"
#include "tests/cpp/gpu/quantize/quantize_reference.h"
#include "tests/cpp/gpu/timing.h"

namespace harness {

inline void TimeQuantize(QuantizeKind kind, int64_t rows, int64_t columns) {
  constexpr int kSets = 5;
  const int64_t num_scales = kind == QuantizeKind::kBlock128 ? (columns + 127) / 128 : 1;
  const int64_t bytes = rows * (3 * columns + 4 * num_scales);
  std::vector<std::unique_ptr<GuardedBuffer>> x, values, scales;
  for (int i = 0; i < kSets; ++i) {
    for (auto* buffers : {&x, &values, &scales}) {
      buffers->push_back(std::make_unique<GuardedBuffer>());
    }
    x[i]->Reset(rows * columns * 2);
    Require(cudaMemset(x[i]->data(), 0x3c, rows * columns * 2), "cudaMemset");
    values[i]->Reset(rows * columns);
    scales[i]->Reset(rows * num_scales * 4);
  }
  const double time = MedianTime([&](int i) {
    i %= kSets;
    const jax_ep::Status status = jax_ep::LaunchQuantize({.kind = kind,
                                                          .type = jax_ep::kBF16,
                                                          .num_rows = rows,
                                                          .columns = columns,
                                                          .min_amax = 1e-4f,
                                                          .power_of_two_scales = false,
                                                          .x = x[i]->data(),
                                                          .values = values[i]->data(),
                                                          .scales = scales[i]->As<float>()},
                                                         nullptr);
    if (!status.ok()) std::printf("FAIL %s\n", status.message.c_str());
  });
  // The copy goes from one half of its bytes to the other.
  std::vector<std::unique_ptr<GuardedBuffer>> copied;
  for (int i = 0; i < kSets; ++i) {
    copied.push_back(std::make_unique<GuardedBuffer>());
    copied[i]->Reset(bytes);
  }
  const double copy = MedianTime([&](int i) {
    uint8_t* const data = copied[i % kSets]->data();
    Require(cudaMemcpyAsync(data + bytes / 2, data, bytes / 2, cudaMemcpyDeviceToDevice, nullptr),
            "a copy");
  });
  std::printf("%-8s %6d x %d: %7.1f us, %6.0f GB/s; a copy %7.1f us, %6.0f GB/s: %.2f\n",
              kind == QuantizeKind::kBlock128 ? "block128"
              : kind == QuantizeKind::kRow    ? "row"
                                              : "row_e5m2",
              int(rows), int(columns), time, bytes / time * 1e-3, copy, bytes / copy * 1e-3,
              copy / time);
  std::fflush(stdout);
}

inline void TimeAll() {
  for (int64_t rows : {32768, 4096}) {
    for (int64_t columns : {7168, 2048}) {
      for (QuantizeKind kind :
           {QuantizeKind::kBlock128, QuantizeKind::kRow, QuantizeKind::kRowE5M2}) {
        TimeQuantize(kind, rows, columns);
      }
    }
  }
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_QUANTIZE_QUANTIZE_TIMING_H_
