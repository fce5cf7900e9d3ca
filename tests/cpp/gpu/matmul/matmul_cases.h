// The test cases: operations and types, and group sizes of many kinds.
#ifndef JAX_EP_TESTS_CPP_GPU_MATMUL_MATMUL_CASES_H_
#define JAX_EP_TESTS_CPP_GPU_MATMUL_MATMUL_CASES_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "tests/cpp/gpu/matmul/matmul_check.h"

namespace harness {

struct Pattern {
  std::string name;
  std::vector<int32_t> sizes;
};

// Returns random sizes with the given sum.
inline std::vector<int32_t> Cut(int64_t sum, int groups, uint64_t seed) {
  std::vector<int64_t> cuts = {0, sum};
  for (int i = 1; i < groups; ++i) cuts.push_back(Hash(seed, i) % (sum + 1));
  std::sort(cuts.begin(), cuts.end());
  std::vector<int32_t> sizes;
  for (int i = 0; i < groups; ++i) sizes.push_back(static_cast<int32_t>(cuts[i + 1] - cuts[i]));
  return sizes;
}

inline std::vector<Pattern> Patterns(int64_t rows, int groups) {
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  constexpr int32_t kLeast = std::numeric_limits<int32_t>::min();
  const auto each = [groups](auto size) {
    std::vector<int32_t> sizes;
    for (int i = 0; i < groups; ++i) sizes.push_back(static_cast<int32_t>(size(i)));
    return sizes;
  };
  std::vector<Pattern> patterns = {
      {"even", each([&](int) { return rows / groups; })},
      {"ragged", Cut(rows, groups, 1)},
      {"short", Cut(rows * 3 / 5, groups, 2)},
      {"half empty", each([&](int i) { return i % 2 ? rows * 2 / groups : 0; })},
      {"empty", each([](int) { return 0; })},
      {"all in first", each([&](int i) { return i == 0 ? rows : 0; })},
      {"all in last", each([&](int i) { return i == groups - 1 ? rows : 0; })},
      {"one row", each([](int) { return 1; })},
      {"128 rows", each([](int) { return 128; })},
      {"past the end", each([&](int) { return rows / groups + rows / 3 + 1; })},
      {"far past the end", each([](int) { return kMost; })},
      {"negative", Cut(rows, groups, 3)},
      {"only negative", each([](int) { return kLeast; })},
  };
  for (size_t i = 0; i < patterns[11].sizes.size(); i += 3) patterns[11].sizes[i] = -7 - int(i);
  return patterns;
}

// Returns sizes for which tiles have every height: every size up to `most`.
inline std::vector<int32_t> EverySize(int32_t most) {
  std::vector<int32_t> sizes;
  for (int32_t size = 1; size <= most; ++size) sizes.push_back(size);
  return sizes;
}

// Returns sizes around multiples of the tiles' rows, which are 256 at most.
inline std::vector<int32_t> SizesOfSeveralTiles() {
  return {257, 264, 300, 511, 512, 513, 530, 600, 768, 769, 1000, 1025, 2100};
}

inline int64_t Sum(const std::vector<int32_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

// The rows of each group, by the definition.
struct Rows {
  std::vector<int32_t> begins, ends, counts, row_group;
  int64_t end = 0;

  Rows(const std::vector<int32_t>& sizes, int64_t rows) : row_group(rows, -1) {
    for (size_t group = 0; group < sizes.size(); ++group) {
      begins.push_back(static_cast<int32_t>(end));
      for (int64_t i = 0; i < sizes[group] && end < rows; ++i) {
        row_group[end++] = static_cast<int32_t>(group);
      }
      ends.push_back(static_cast<int32_t>(end));
      counts.push_back(ends.back() - begins.back());
    }
  }
};

struct Kind {
  bool is_gradient;
  bool transpose;
  ElementType lhs;
  ElementType right;
  ElementType out;
  bool accumulates = false;  // gradients: adds to the result

  std::string Name() const {
    const auto type = [](ElementType type) {
      return std::string(type == kF32 ? "f32" : type == kBF16 ? "bf16" : "f16");
    };
    return std::string(is_gradient ? "gradient" : "forward") + (transpose ? " transposed " : " ") +
           type(lhs) + " x " + type(right) + (accumulates ? " +-> " : " -> ") + type(out);
  }
};

inline constexpr Kind kForward = {false, false, kBF16, kBF16, kBF16};
inline constexpr Kind kTransposed = {false, true, kBF16, kBF16, kBF16};
inline constexpr Kind kRhsGradient = {true, false, kBF16, kBF16, kBF16};
inline constexpr Kind kAccumulation = {true, false, kBF16, kBF16, kF32, true};

inline std::vector<Kind> Kinds() {
  std::vector<Kind> kinds;
  for (bool transpose : {false, true}) {
    for (ElementType lhs : {kBF16, kF16, kF32}) {
      for (ElementType right : {lhs, kF32}) {
        for (ElementType out : {lhs, kF32}) {
          if (lhs == kF32 && (right == kF32 || out == kF32)) continue;
          kinds.push_back({false, transpose, lhs, right, out});
        }
      }
      if (lhs == kF32) kinds.push_back({false, transpose, kF32, kF32, kF32});
      kinds.push_back({true, transpose, lhs, lhs, lhs});
      if (lhs != kF32) kinds.push_back({true, transpose, lhs, lhs, kF32});
      kinds.push_back({true, transpose, lhs, lhs, kF32, true});
    }
  }
  return kinds;
}

struct Case {
  Kind kind;
  int64_t m, k, n;
  std::vector<int32_t> sizes;
  bool zero_tail = true;
  int64_t num_sms = 0;
  bool misaligned = false;  // operands and result begin at odd elements
  int32_t tile_counter = 0;
  int64_t num_samples = 0;  // 0: every element is checked
};

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MATMUL_MATMUL_CASES_H_
