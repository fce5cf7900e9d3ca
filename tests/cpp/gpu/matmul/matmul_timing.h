// Times grouped matmuls. Launches take turns on several sets of operands, so that none finds its
// own in the L2 cache.
#ifndef JAX_EP_TESTS_CPP_GPU_MATMUL_MATMUL_TIMING_H_
#define JAX_EP_TESTS_CPP_GPU_MATMUL_MATMUL_TIMING_H_

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

#include "tests/cpp/gpu/matmul/matmul_runner.h"

namespace harness {

// The bytes that a kernel must read and write at least.
inline double BytesOf(const Case& c) {
  const double rows = static_cast<double>(c.m);
  const double matrices = static_cast<double>(c.sizes.size()) * c.k * c.n;
  const double lhs = rows * c.k * jax_ep::ElementBytes(c.kind.lhs);
  const double right = jax_ep::ElementBytes(c.kind.right);
  const double out = jax_ep::ElementBytes(c.kind.out) * (c.kind.accumulates ? 2 : 1);
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

// Returns milliseconds, after two launches that do not count. Launches are enqueued without a wait,
// so that only the kernel is between two events.
inline std::vector<float> TimeLaunches(const Case& c, int iterations) {
  std::vector<std::unique_ptr<Runner>> sets;
  for (int i = CountSets(c); i > 0; --i) sets.push_back(std::make_unique<Runner>(c));
  std::vector<cudaEvent_t> events(2 * (iterations + 2));
  for (cudaEvent_t& event : events) Require(cudaEventCreate(&event), "an event");
  for (int i = 0; i < iterations + 2; ++i) {
    Require(cudaEventRecord(events[2 * i]), "an event");
    if (const jax_ep::Status status = sets[i % sets.size()]->Launch(); !status.ok()) {
      std::printf("FAIL timing: %s\n", status.message.c_str());
      std::_Exit(1);
    }
    Require(cudaEventRecord(events[2 * i + 1]), "an event");
  }
  Require(cudaDeviceSynchronize(), "the kernels");
  std::vector<float> times(iterations);
  for (int i = 0; i < iterations; ++i) {
    Require(cudaEventElapsedTime(&times[i], events[2 * i + 4], events[2 * i + 5]), "an event");
  }
  for (cudaEvent_t event : events) Require(cudaEventDestroy(event), "an event");
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

// Returns the sizes of `rows` random draws of groups: each group equally likely, or with
// probabilities that fall as rank^-exponent, the ranks in a random order.
inline std::vector<int32_t> Draw(int64_t rows, int groups, double exponent) {
  std::vector<double> ends;
  double total = 0;
  for (int i = 0; i < groups; ++i) {
    const int rank = 1 + (i * 29 + 11) % groups;
    ends.push_back(total += std::pow(rank, -exponent));
  }
  std::vector<int32_t> sizes(groups);
  for (int64_t row = 0; row < rows; ++row) {
    const double at = Hash(21, row) * 0x1p-32 * total;
    ++sizes[std::lower_bound(ends.begin(), ends.end() - 1, at) - ends.begin()];
  }
  return sizes;
}

inline void TimeAll() {
  struct Shape {
    int64_t m, k, n;
    int groups;
  };
  const auto even = [](int64_t rows, int groups) {
    return std::vector<int32_t>(groups, static_cast<int32_t>(rows / groups));
  };
  for (const Shape& s : {Shape{32768, 7168, 4096, 64},
                         {32768, 2048, 7168, 64},
                         {32768, 2048, 1536, 32},
                         {32768, 768, 2048, 32},
                         {8192, 4096, 28672, 2}}) {
    const auto time = [&](Kind kind, const char* name, std::vector<int32_t> sizes) {
      Time({.kind = kind, .m = s.m, .k = s.k, .n = s.n, .sizes = std::move(sizes)}, name);
    };
    for (const Kind& kind : {kForward, kTransposed, kRhsGradient}) {
      time(kind, "even", even(s.m, s.groups));
      if (s.k == 7168) {
        time(kind, "multinomial", Draw(s.m, s.groups, 0));
        time(kind, "Zipf 1.2", Draw(s.m, s.groups, 1.2));
      }
    }
    if (s.k == 7168) {
      time({true, false, kBF16, kBF16, kF32}, "even", even(s.m, s.groups));
      time(kAccumulation, "even", even(s.m, s.groups));
      time({false, false, kBF16, kF32, kBF16}, "even", even(s.m, s.groups));
    }
  }
  for (const Kind& kind : {kForward, kTransposed, kRhsGradient}) {  // as in decoding: bytes count
    Time({.kind = kind, .m = 512, .k = 7168, .n = 4096, .sizes = even(512, 64)}, "8 rows each");
  }
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MATMUL_MATMUL_TIMING_H_
