// Times grouped matmuls. Launches take turns on several sets of operands, so that none finds its
// own in the L2 cache.
#ifndef JAX_EP_TESTS_GPU_MATMUL_TIMING_H_
#define JAX_EP_TESTS_GPU_MATMUL_TIMING_H_

#include <algorithm>
#include <cstdio>
#include <memory>
#include <vector>

#include "tests/gpu/matmul_runner.h"

namespace harness {

// What a kernel must read and write once.
inline double BytesOf(const Case& c) {
  const double rows = static_cast<double>(c.m);
  const double matrices = static_cast<double>(c.sizes.size()) * c.k * c.n;
  const double lhs = rows * c.k * jax_ep::ElementBytes(c.kind.lhs);
  const double right = jax_ep::ElementBytes(c.kind.right);
  const double out = jax_ep::ElementBytes(c.kind.out);
  return c.kind.is_gradient ? lhs + rows * c.n * right + matrices * out
                            : lhs + matrices * right + rows * c.n * out;
}

// Enough sets that more than four times the L2 cache is read before a set is used again.
inline int CountSets(const Case& c) {
  int device = 0;
  int l2_bytes = 0;
  Require(cudaGetDevice(&device), "cudaGetDevice");
  Require(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device), "the L2 cache");
  return 2 + static_cast<int>(4.0 * l2_bytes / BytesOf(c));
}

// In milliseconds, after two launches that are not counted.
inline std::vector<float> TimeLaunches(const Case& c, int iterations) {
  std::vector<std::unique_ptr<Runner>> sets;
  for (int i = CountSets(c); i > 0; --i) sets.push_back(std::make_unique<Runner>(c));
  cudaEvent_t begin, end;
  Require(cudaEventCreate(&begin), "an event");
  Require(cudaEventCreate(&end), "an event");
  std::vector<float> times;
  for (int i = -2; i < iterations; ++i) {
    const Runner& runner = *sets[(i + 2) % sets.size()];
    Require(cudaEventRecord(begin), "an event");
    if (const jax_ep::Status status = runner.Launch(); !status.ok()) {
      std::printf("FAIL timing: %s\n", status.message.c_str());
      std::_Exit(1);
    }
    Require(cudaEventRecord(end), "an event");
    Require(cudaEventSynchronize(end), "the kernel");
    float milliseconds = 0;
    Require(cudaEventElapsedTime(&milliseconds, begin, end), "an event");
    if (i >= 0) times.push_back(milliseconds);
  }
  Require(cudaEventDestroy(begin), "an event");
  Require(cudaEventDestroy(end), "an event");
  return times;
}

inline void Time(const Case& c, const char* groups, int iterations = 20) {
  std::vector<float> times = TimeLaunches(c, iterations);
  std::sort(times.begin(), times.end());
  const double median = times[times.size() / 2];
  const double flops = 2.0 * Rows(c.sizes, c.m).end * c.k * c.n;
  std::printf(
      "%-38s M=%-6d K=%-5d N=%-5d %3zu %-14s %8.3f ms (%.3f to %.3f)  %6.1f TFLOP/s  %5.2f"
      " TB/s\n",
      c.kind.Name().c_str(), int(c.m), int(c.k), int(c.n), c.sizes.size(), groups, median,
      times.front(), times.back(), flops / median * 1e-9, BytesOf(c) / median * 1e-9);
  std::fflush(stdout);
}

inline void TimeAll() {
  struct Shape {
    int64_t m, k, n;
    int groups;
  };
  const auto even = [](int64_t rows, int groups) {
    return std::vector<int32_t>(groups, static_cast<int32_t>(rows / groups));
  };
  for (const Shape& s :
       {Shape{32768, 7168, 4096, 64}, {32768, 2048, 7168, 64}, {32768, 768, 2048, 32}}) {
    const auto time = [&](Kind kind, bool ragged = false) {
      Time({.kind = kind,
            .m = s.m,
            .k = s.k,
            .n = s.n,
            .sizes = ragged ? Cut(s.m, s.groups, 13) : even(s.m, s.groups)},
           ragged ? "ragged groups" : "even groups");
    };
    for (bool ragged : {false, true}) {
      time({false, false, kBF16, kBF16, kBF16}, ragged);
      time({false, true, kBF16, kBF16, kBF16}, ragged);
      time({true, false, kBF16, kBF16, kBF16}, ragged);
    }
    time({true, true, kBF16, kBF16, kBF16});
    time({true, false, kBF16, kBF16, kF32});
    time({false, false, kF16, kF16, kF16});
    time({false, false, kBF16, kF32, kBF16});
    time({false, true, kBF16, kF32, kBF16});
  }
  for (bool transpose : {false, true}) {  // what decoding looks like: bytes count
    const Kind kind = {false, transpose, kBF16, kBF16, kBF16};
    Time({.kind = kind, .m = 512, .k = 7168, .n = 4096, .sizes = even(512, 64)}, "8 rows each");
  }
  for (bool is_gradient : {false, true}) {
    for (bool transpose : {false, true}) {
      const Kind kind = {is_gradient, transpose, kF32, kF32, kF32};
      Time({.kind = kind, .m = 4096, .k = 2048, .n = 4096, .sizes = even(4096, 16)}, "even groups",
           5);
    }
  }
}

}  // namespace harness

#endif  // JAX_EP_TESTS_GPU_MATMUL_TIMING_H_
