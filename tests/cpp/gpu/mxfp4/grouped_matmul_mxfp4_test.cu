// Compares the grouped matmul with MXFP4 weights with loops in float64, on the current GPU (compute
// capability 9.0).
//
//   grouped_matmul_mxfp4_test [MODE]
//
//   check   every check
//   small   small checks, each buffer an allocation of its own: for compute-sanitizer
//   time    decoding and many rows, interleaved with the bfloat16 kernel and beside a copy
//   decode  the same of decoding alone
//   all     check, then time (the default)
//
// Needs 6 GB of free memory.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "tests/cpp/gpu/matmul/modes.h"
#include "tests/cpp/gpu/matmul/report.h"
#include "tests/cpp/gpu/mxfp4/mxfp4_runner.h"
#ifndef JAX_EP_EMULATION  // a CPU's times say nothing
#include "tests/cpp/gpu/mxfp4/mxfp4_timing.h"
#endif

namespace harness {
namespace {

struct Shape {
  int64_t m, k, n;
};

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
  MxFp4Runner runner({1, 32, 8, {1}});
  for (const ScaleRange& range : kRanges) {
    int cases = 0;
    int failed = 0;
    double error = 0;
    for (const Shape& shape : shapes) {
      for (int groups : group_counts) {
        for (const Pattern& pattern : Patterns(shape.m, groups)) {
          ++index;
          MxFp4Case c{shape.m, shape.k, shape.n, pattern.sizes};
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
          std::printf("  M=%d K=%d N=%d G=%d %s: %s\n", int(c.m), int(c.k), int(c.n), groups,
                      pattern.name.c_str(), problem.c_str());
        }
      }
    }
    char text[128];
    std::snprintf(text, sizeof text, "%d of %d cases; worst error 2^%.2f of absolute products",
                  cases - failed, cases, error > 0 ? std::log2(error) : -99.0);
    Report(failed == 0, range.name, text);
  }
}

// A single 1 in each of `rows` rows, all in the first group, makes a weight of each result: every
// value with the scales from `first` on, and NaN where a scale is NaN.
void CheckEveryWeight(int first, int count, int32_t rows, int groups, const std::string& name) {
  std::vector<int32_t> sizes(groups);
  sizes[0] = rows;
  MxFp4Case c{rows, rows, 256, sizes};
  c.first_scale = first;
  c.num_scales = count;
  c.is_one_hot = true;
  MxFp4Runner runner(c);
  bool ok = runner.Launch().ok();
  const std::vector<uint8_t> result = runner.Result();
  const std::vector<uint8_t> values = runner.Values();
  const std::vector<uint8_t> scales = runner.Scales();
  std::vector<bool> is_nan(c.n);
  for (int64_t i = 0; i < c.n * c.k / kMxFp4Values; ++i) {
    if (scales[i] == 255) is_nan[i / (c.k / kMxFp4Values)] = true;
  }
  int64_t wrong = 0;
  std::string problem;
  for (int64_t row = 0; row < c.m; ++row) {
    for (int64_t column = 0; column < c.n; ++column) {
      uint16_t bits;
      std::memcpy(&bits, &result[(row * c.n + column) * 2], 2);
      const int64_t weight = column * c.k + row;
      const double expected = DecodeMxFp4(values.data(), scales.data(), weight);
      const double got = FromBFloat16(bits);
      if (is_nan[column] ? std::isnan(got) : got == expected) continue;
      if (wrong++ > 0) continue;
      char text[128];
      std::snprintf(text, sizeof text, "row %d column %d is %g, expected %g (scale %d)", int(row),
                    int(column), got, expected, scales[weight / kMxFp4Values]);
      problem = text;
    }
  }
  ok = ok && wrong == 0;
  Report(ok, name, wrong == 0 ? "" : std::to_string(wrong) + " wrong; " + problem);
}

void CheckEveryWeight() {
  for (int groups : {1, 52}) {
    const std::string of_groups = groups == 1 ? "" : ", decoding";
    CheckEveryWeight(2, 251, 512, groups, "every value, scales up to 2^125" + of_groups);
    CheckEveryWeight(120, 16, 512, groups, "every value, scales about 2" + of_groups);
    CheckEveryWeight(0, 2, 512, groups, "every value, subnormal scales" + of_groups);
    CheckEveryWeight(240, 13, 512, groups, "every value, the largest scales" + of_groups);
    CheckEveryWeight(255, 1, 512, groups, "scales of NaN" + of_groups);
  }
}

// Tiles of every height, and groups of several tiles.
void CheckHeights() {
  const struct {
    const char* name;
    std::vector<int32_t> sizes;
    int64_t k;
  } all[] = {{"every height", EverySize(270), 352},
             {"every height of a few rows", EverySize(19), 384},
             {"every height of fewer rows", EverySize(5), 576},
             {"several tiles", SizesOfSeveralTiles(), 352}};
  for (const auto& [name, sizes, k] : all) {
    double error = 0;
    MxFp4Case c{Sum(sizes), k, 264, sizes};
    c.num_samples = 1 << 21;
    MxFp4Runner runner(c);
    const std::string problem = runner.Run(&error);
    Report(problem.empty(), name, problem);
  }
}

#ifndef JAX_EP_EMULATION
// The shapes that are timed; a sample of each result.
void CheckLarge() {
  for (const Shape& s :
       {Shape{64, 2880, 5760}, {4096, 2880, 5760}, {16384, 2880, 2880}, {5000, 7168, 4096}}) {
    double error = 0;
    MxFp4Case c{s.m, s.k, s.n, Draw(s.m, 32, 0)};
    c.num_samples = 1 << 17;
    MxFp4Runner runner(c);
    const std::string problem = runner.Run(&error);
    char text[128];
    std::snprintf(text, sizeof text, "worst error 2^%.2f of absolute products %s", std::log2(error),
                  problem.c_str());
    Report(problem.empty(), "M = " + std::to_string(s.m) + ", K = " + std::to_string(s.k), text);
  }
}
#endif

void CheckDeterminism(int64_t rows, const std::vector<int32_t>& sizes) {
  MxFp4Runner runner({rows, 1088, 520, sizes});
  std::vector<uint8_t> first;
  Report(HasSameBits(runner, &first, [] {}),
         std::to_string(rows) + " rows: bits do not depend on the run or num_sms", "");
}

// Many short tiles, to find rare races between warps.
void CheckManyTiles(int64_t rows, const std::vector<int32_t>& sizes) {
  std::string problem;
  double error = 0;
  for (int round = 0; round < 4 && problem.empty(); ++round) {
    MxFp4Case c{rows, 64 + 192 * round, 4096, sizes};
    c.num_samples = 1 << 16;
    c.seed = 100 * round;
    MxFp4Runner runner(c);
    for (int i = 0; i < 2000; ++i) static_cast<void>(runner.Launch());
    problem = runner.Run(&error);
  }
  Report(problem.empty(), "many short tiles of " + std::to_string(rows) + " rows", problem);
}

void CheckManyTiles() {
  std::vector<int32_t> many;
  for (int i = 0; i < 64; ++i) many.push_back(20 + i * 13 % 149);
  CheckManyTiles(8192, many);
  std::vector<int32_t> few;
  for (int i = 0; i < 64; ++i) few.push_back(i * 13 % 11);
  CheckManyTiles(320, few);
  CheckManyTiles(16, Cut(16, 7, 5));
}

void CheckSmall() {
  CheckPatterns({{70, 160, 136}, {400, 416, 264}, {70, 1056, 136}}, {3});
  CheckPatterns({{300, 448, 264}, {70, 1088, 136}, {15, 1088, 72}}, {30});
}

void CheckAll() {
  CheckEveryWeight();
  CheckPatterns({{1, 128, 128},
                 {3, 32, 8},
                 {16, 64, 8},
                 {70, 160, 136},
                 {12, 1216, 200},
                 {16, 2880, 136},
                 {300, 448, 264},
                 {300, 416, 264},
                 {700, 1024, 512},
                 {515, 640, 8},
                 {130, 1216, 136},
                 {260, 2112, 392},
                 {260, 3072, 392},
                 {260, 3136, 136}},
                {1, 5, 40});
  CheckHeights();
#ifndef JAX_EP_EMULATION
  CheckLarge();
#endif
  CheckDeterminism(3000, Cut(2700, 7, 5));
  CheckDeterminism(200, Cut(180, 20, 5));
  CheckDeterminism(16, Cut(15, 4, 5));
  CheckManyTiles();
}

}  // namespace
}  // namespace harness

#ifndef JAX_EP_EMULATION  // does not time
int main(int argc, char** argv) {
  using namespace harness;
  return RunModes(argc, argv,
                  {{"small", CheckSmall},
                   {"check", CheckAll},
                   {"time", [] { TimeMxFp4(false); }},
                   {"decode", [] { TimeMxFp4(true); }}});
}
#endif
