// Compares results with the bounds of float32 arithmetic, rounded as results are.
#ifndef JAX_EP_TESTS_CPP_GPU_INTERVALS_H_
#define JAX_EP_TESTS_CPP_GPU_INTERVALS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/gpu/matmul/matmul_check.h"

namespace harness {

// The numbers that a kernel's result may be.
struct Interval {
  double low;
  double high;

  double Most() const { return std::max(std::abs(low), std::abs(high)); }
  Interval Widened(double error) const { return {low - error, high + error}; }
};

inline Interval Around(double value, double error) { return {value - error, value + error}; }

inline Interval Hull(const Interval& a, const Interval& b) {
  return {std::min(a.low, b.low), std::max(a.high, b.high)};
}

inline constexpr double kRounding = 0x1p-24;  // the relative error of rounding to float32

inline Interval Times(const Interval& a, const Interval& b) {
  const auto [low, high] =
      std::minmax({a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high});
  const Interval product = {low, high};
  return product.Widened(kRounding * product.Most());
}

// Rounding is monotonic, so the rounded ends are the bounds. Often they are one number: the result
// is then known to the bit.
inline Interval Rounded(ElementType type, const Interval& exact) {
  return {RoundTo(type, exact.low), RoundTo(type, exact.high)};
}

// Counts of comparisons, and the first problem.
struct Tally {
  int64_t numbers = 0;
  int64_t certain = 0;  // results with one legal value
  int64_t wrong = 0;
  std::string problem;  // the first one

  void Fail(const std::string& what) {
    if (wrong++ == 0) problem = what;
  }

  void Expect(const char* what, int64_t row, int64_t column, double got, const Interval& expected) {
    ++numbers;
    if (expected.low == expected.high) ++certain;
    if (got >= expected.low && got <= expected.high) return;  // NaN is not
    char text[160];
    std::snprintf(text, sizeof text, "%s[%lld, %lld] is %.9g, expected %.9g to %.9g", what,
                  static_cast<long long>(row), static_cast<long long>(column), got, expected.low,
                  expected.high);
    Fail(text);
  }

  void Add(const Tally& other) {
    numbers += other.numbers;
    certain += other.certain;
    if (wrong == 0) problem = other.problem;
    wrong += other.wrong;
  }
};

// Runs on all processors: sums in float64 take longer than the kernels.
template <typename Function>
Tally ForEachRow(int64_t rows, const Function& check) {
  std::vector<Tally> tallies(std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::thread> threads;
  for (size_t t = 0; t < tallies.size(); ++t) {
    threads.emplace_back([&, t] {
      for (int64_t row = t; row < rows; row += tallies.size()) check(row, &tallies[t]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  Tally total;
  for (const Tally& tally : tallies) total.Add(tally);
  return total;
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_INTERVALS_H_
