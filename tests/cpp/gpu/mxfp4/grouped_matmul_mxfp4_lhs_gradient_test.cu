// Compares the row gradient of grouped matmuls with MXFP4 weights with loops in float64, on the
// current GPU (compute capability 9.0).
//
//   grouped_matmul_mxfp4_lhs_gradient_test [MODE]
//
//   check   every check
//   small   small checks, each buffer an allocation of its own: for compute-sanitizer
//   time    few and many rows, interleaved with the bfloat16 kernel and with a pass that
//   dequantizes all     check, then time (the default)
//
// Needs 6 GB of free memory. k is the contracted dimension, and n has the blocks of 32 values.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "tests/cpp/gpu/matmul/modes.h"
#include "tests/cpp/gpu/matmul/report.h"
#include "tests/cpp/gpu/mxfp4/mxfp4_lhs_gradient_timing.h"
#include "tests/cpp/gpu/mxfp4/mxfp4_runner.h"

namespace harness {
namespace {

struct Shape {
  int64_t m, k, n;
};

MxFp4Case Gradient(const Shape& shape, const std::vector<int32_t>& sizes) {
  MxFp4Case c{shape.m, shape.k, shape.n, sizes};
  c.is_lhs_gradient = true;
  return c;
}

// Scales of usual weights, around those that need two factors, and the ends of what sums hold.
struct ScaleRange {
  const char* name;
  int first;
  int count;
};
constexpr ScaleRange kRanges[] = {{"usual scales", 116, 8},
                                  {"scales about 2", 124, 10},
                                  {"small scales", 40, 4},
                                  {"large scales", 214, 4}};

void CheckPatterns(const std::vector<Shape>& shapes, const std::vector<int>& group_counts) {
  uint64_t index = 0;
  MxFp4Runner runner(Gradient({1, 8, 32}, {1}));
  for (const ScaleRange& range : kRanges) {
    int cases = 0;
    int failed = 0;
    double error = 0;
    for (const Shape& shape : shapes) {
      for (int groups : group_counts) {
        for (const Pattern& pattern : Patterns(shape.m, groups)) {
          ++index;
          MxFp4Case c = Gradient(shape, pattern.sizes);
          c.seed = index * 10;
          c.zero_tail = index % 2 == 0;
          c.num_sms = index % 3 == 0 ? 0 : index % 3 == 1 ? 1 : 5;
          c.tile_counter = index % 5 == 0 ? -1 : static_cast<int32_t>(index % 7);
          c.first_scale = range.first;
          c.num_scales = range.count;
          c.out = index % 4 == 1 ? kF32 : kBF16;
          runner.Prepare(c);
          ++cases;
          const std::string problem = runner.Run(&error);
          if (problem.empty() || failed++ >= 3) continue;
          std::printf("  M=%d K=%d N=%d G=%d %s%s: %s\n", int(c.m), int(c.k), int(c.n), groups,
                      pattern.name.c_str(), c.out == kF32 ? " float32" : "", problem.c_str());
        }
      }
    }
    char text[128];
    std::snprintf(text, sizeof text, "%d of %d cases; worst error 2^%.2f of absolute products",
                  cases - failed, cases, error > 0 ? std::log2(error) : -99.0);
    Report(failed == 0, range.name, text);
  }
}

// A single 1 in each row makes a weight of each result: every value with the scales from `first`
// on. A scale of NaN makes one of its columns in every row, even of zeros.
void CheckEveryWeight(int64_t m, int first, int count, const char* name) {
  MxFp4Case c = Gradient({m, 256, 512}, {static_cast<int32_t>(m)});
  c.first_scale = first;
  c.num_scales = count;
  c.is_one_hot = true;
  MxFp4Runner runner(c);
  bool ok = runner.Launch().ok();
  const std::vector<uint8_t> result = runner.Result();
  const std::vector<uint8_t> values = runner.Values();
  const std::vector<uint8_t> scales = runner.Scales();
  const int64_t blocks = c.n / kMxFp4Values;
  std::vector<bool> is_nan(blocks);
  for (size_t i = 0; i < scales.size(); ++i) {
    if (scales[i] == 255) is_nan[i % blocks] = true;
  }
  int64_t wrong = 0;
  std::string problem;
  for (int64_t row = 0; row < c.m; ++row) {
    for (int64_t column = 0; column < c.n; ++column) {
      uint16_t bits;
      std::memcpy(&bits, &result[(row * c.n + column) * 2], 2);
      const int64_t weight = row % c.k * c.n + column;
      const double expected = DecodeMxFp4(values.data(), scales.data(), weight);
      const double got = FromBFloat16(bits);
      if (is_nan[column / kMxFp4Values] ? std::isnan(got) : got == expected) continue;
      if (wrong++ > 0) continue;
      char text[128];
      std::snprintf(text, sizeof text, "row %d column %d is %g, expected %g (scale %d)", int(row),
                    int(column), got, expected, scales[weight / kMxFp4Values]);
      problem = text;
    }
  }
  ok = ok && wrong == 0;
  Report(ok, std::string(name) + ", " + std::to_string(m) + " rows",
         wrong == 0 ? "" : std::to_string(wrong) + " wrong; " + problem);
}

void CheckEveryWeight() {
  for (int64_t m : {512, 48}) {
    CheckEveryWeight(m, 2, 251, "every value, scales up to 2^125");
    CheckEveryWeight(m, 120, 16, "every value, scales about 2");
    CheckEveryWeight(m, 0, 2, "every value, subnormal scales");
    CheckEveryWeight(m, 240, 13, "every value, the largest scales");
    CheckEveryWeight(m, 255, 1, "scales of NaN");
  }
}

// Tiles of every height, and groups of several tiles.
void CheckHeights() {
  for (const auto& [name, sizes] :
       {std::pair{"every height", EverySize(270)}, {"several tiles", SizesOfSeveralTiles()}}) {
    for (ElementType out : {kBF16, kF32}) {
      double error = 0;
      MxFp4Case c = Gradient({Sum(sizes), 264, 352}, sizes);
      c.num_samples = 1 << 21;
      c.out = out;
      MxFp4Runner runner(c);
      const std::string problem = runner.Run(&error);
      Report(problem.empty(), std::string(name) + (out == kF32 ? ", float32" : ""), problem);
    }
  }
}

// The shapes that are timed; a sample of each result.
void CheckLarge() {
  for (const Shape& s :
       {Shape{64, 5760, 2880}, {4096, 5760, 2880}, {16384, 2880, 2880}, {5000, 4096, 7168}}) {
    double error = 0;
    MxFp4Case c = Gradient(s, Draw(s.m, 32, 0));
    c.num_samples = 1 << 17;
    MxFp4Runner runner(c);
    const std::string problem = runner.Run(&error);
    char text[128];
    std::snprintf(text, sizeof text, "worst error 2^%.2f of absolute products %s", std::log2(error),
                  problem.c_str());
    Report(problem.empty(), "M = " + std::to_string(s.m) + ", K = " + std::to_string(s.k), text);
  }
}

void CheckDeterminism() {
  MxFp4Runner runner(Gradient({3000, 520, 1056}, Cut(2700, 7, 5)));
  std::vector<uint8_t> first;
  Report(HasSameBits(runner, &first, [] {}), "bits do not depend on the run or num_sms", "");
}

// Many short tiles, to find rare races between warps of a cluster.
void CheckManyTiles() {
  std::vector<int32_t> sizes;
  for (int i = 0; i < 64; ++i) sizes.push_back(20 + i * 13 % 149);
  std::string problem;
  double error = 0;
  for (int round = 0; round < 4 && problem.empty(); ++round) {
    MxFp4Case c = Gradient({8192, 96 + 160 * round, 4096}, sizes);
    c.num_samples = 1 << 16;
    c.seed = 100 * round;
    MxFp4Runner runner(c);
    for (int i = 0; i < 2000; ++i) static_cast<void>(runner.Launch());
    problem = runner.Run(&error);
  }
  Report(problem.empty(), "10^7 short tiles", problem);
}

void CheckSmall() { CheckPatterns({{70, 136, 160}, {300, 264, 416}, {70, 136, 1056}}, {3}); }

void CheckAll() {
  CheckEveryWeight();
  CheckPatterns({{1, 128, 128},
                 {3, 8, 32},
                 {70, 136, 160},
                 {300, 264, 416},
                 {700, 512, 1024},
                 {515, 8, 640},
                 {130, 136, 1184},
                 {260, 392, 2080}},
                {1, 5, 40});
  CheckHeights();
  CheckLarge();
  CheckDeterminism();
  CheckManyTiles();
}

}  // namespace
}  // namespace harness

int main(int argc, char** argv) {
  using namespace harness;
  return RunModes(argc, argv,
                  {{"small", CheckSmall}, {"check", CheckAll}, {"time", TimeMxFp4LhsGradients}});
}
