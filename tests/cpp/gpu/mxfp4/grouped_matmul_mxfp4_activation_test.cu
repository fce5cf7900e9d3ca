// Compares the grouped matmul with MXFP4 weights, a bias, an activation and row weights with loops
// in float64, on the current GPU (compute capability 9.0).
//
//   grouped_matmul_mxfp4_activation_test [MODE]
//
//   check   every check
//   small   small checks, each buffer an allocation of its own: for compute-sanitizer
//   time    the matmuls of gpt-oss's experts, beside matmuls without an epilogue
//   all     check, then time (the default)
//
// Needs 4 GB of free memory.
#include <cmath>
#include <string>
#include <vector>

#include "tests/cpp/gpu/matmul/modes.h"
#include "tests/cpp/gpu/matmul/report.h"
#include "tests/cpp/gpu/mxfp4/mxfp4_activation_runner.h"
#include "tests/cpp/gpu/mxfp4/mxfp4_activation_timing.h"

namespace harness {
namespace {

struct Shape {
  int64_t m, k, f;
};

// Returns the scale with which pre-activations are about 4, where limits and bends show.
int UsualScale(int64_t k) {
  return 127 - static_cast<int>(std::lround(std::log2(static_cast<double>(k)) / 2 - 1.5));
}

// The options and the scales of case number `index`.
MxFp4ActivationCase MakeCase(const MxFp4ActivationKind& kind, const Shape& shape,
                             const Pattern& pattern, uint64_t index) {
  MxFp4ActivationCase c = {
      .kind = kind, .m = shape.m, .k = shape.k, .f = shape.f, .sizes = pattern.sizes};
  c.seed = index * 10;
  const uint32_t options = Hash(index, 1);
  c.has_bias = options % 2 != 0;
  c.has_weights = options / 2 % 2 != 0;
  c.keeps = kind.IsGated() && options / 4 % 2 != 0;
  c.num_sms = index % 3 == 0 ? 0 : index % 3 == 1 ? 1 : 5;
  c.tile_counter = index % 5 == 0 ? -1 : static_cast<int32_t>(index % 7);
  c.first_scale = UsualScale(shape.k) - 1;
  if (index % 8 == 3) c.first_scale = 214, c.num_scales = 4;
  if (index % 8 == 6) c.first_scale = 40, c.num_scales = 4;
  if (index % 16 == 9) c.first_scale = 255, c.num_scales = 1;  // NaN
  return c;
}

void CheckPatterns(const std::vector<Shape>& shapes, const std::vector<int>& group_counts) {
  MxFp4ActivationRunner runner({.kind = kMxFp4Kinds[0], .m = 1, .k = 32, .f = 8, .sizes = {1}});
  uint64_t index = 0;
  for (const MxFp4ActivationKind& kind : kMxFp4Kinds) {
    int cases = 0;
    int failed = 0;
    for (const Shape& shape : shapes) {
      for (int groups : group_counts) {
        for (const Pattern& pattern : Patterns(shape.m, groups)) {
          const MxFp4ActivationCase c = MakeCase(kind, shape, pattern, ++index);
          runner.Prepare(c);
          ++cases;
          const std::string problem = runner.Run();
          if (problem.empty() || failed++ >= 3) continue;
          std::printf("  M=%d K=%d F=%d G=%d %s bias=%d weights=%d keeps=%d scale=%d: %s\n",
                      int(c.m), int(c.k), int(c.f), groups, pattern.name.c_str(), c.has_bias,
                      c.has_weights, c.keeps, c.first_scale, problem.c_str());
        }
      }
    }
    Report(failed == 0, kind.name,
           std::to_string(cases - failed) + " of " + std::to_string(cases) + " cases");
  }
}

// Tiles of every height, and groups of several tiles, with every option.
void CheckHeights() {
  for (const auto& [name, sizes] :
       {std::pair{"every height", EverySize(270)}, {"several tiles", SizesOfSeveralTiles()}}) {
    for (const MxFp4ActivationKind& kind : {kMxFp4Kinds[0], kMxFp4Kinds[3]}) {
      for (bool has_options : {false, true}) {
        MxFp4ActivationCase c = {.kind = kind,
                                 .m = Sum(sizes) + 70,
                                 .k = has_options ? 352 : 1056,
                                 .f = 264,
                                 .sizes = sizes,
                                 .has_bias = has_options,
                                 .has_weights = has_options,
                                 .keeps = has_options && kind.IsGated()};
        c.num_samples = 1 << 21;
        c.first_scale = UsualScale(c.k) - 1;
        MxFp4ActivationRunner runner(c);
        const std::string problem = runner.Run();
        Report(problem.empty(),
               std::string(name) + ", " + kind.name + (has_options ? ", with all options" : ""),
               problem);
      }
    }
  }
}

// The shapes of gpt-oss's experts; a sample of each result.
void CheckLarge() {
  for (const MxFp4ActivationKind& kind : {kMxFp4Kinds[0], kMxFp4Kinds[3]}) {
    for (int64_t rows : {1, 16, 64, 1024, 4096}) {
      MxFp4ActivationCase c = {.kind = kind,
                               .m = rows + 32,
                               .k = 2880,
                               .f = 2880,
                               .sizes = Draw(rows, 32, 0),
                               .has_bias = true,
                               .has_weights = !kind.IsGated()};
      c.num_samples = 1 << 17;
      c.first_scale = UsualScale(c.k) - 1;
      MxFp4ActivationRunner runner(c);
      const std::string problem = runner.Run();
      Report(problem.empty(), std::to_string(rows) + " rows of gpt-oss, " + kind.name, problem);
    }
  }
}

void CheckDeterminism() {
  for (const MxFp4ActivationKind& kind : {kMxFp4Kinds[0], kMxFp4Kinds[3]}) {
    MxFp4ActivationRunner runner({.kind = kind,
                                  .m = 3000,
                                  .k = 1056,
                                  .f = 520,
                                  .sizes = Cut(2700, 7, 5),
                                  .has_bias = true,
                                  .has_weights = true});
    std::vector<uint8_t> first;
    Report(HasSameBits(runner, &first, [] {}),
           std::string(kind.name) + ": bits do not depend on the run or num_sms", "");
  }
}

// Many short tiles, to find rare races between warps of a cluster.
void CheckManyTiles() {
  std::vector<int32_t> sizes;
  for (int i = 0; i < 64; ++i) sizes.push_back(i % 2 == 0 ? 1 + i % 32 : 20 + i * 13 % 149);
  std::string problem;
  for (int round = 0; round < 4 && problem.empty(); ++round) {
    MxFp4ActivationCase c = {.kind = kMxFp4Kinds[round % 2 == 0 ? 3 : 0],
                             .m = 8192,
                             .k = 96 + 160 * round,
                             .f = 2048,
                             .sizes = sizes,
                             .has_bias = true,
                             .has_weights = true};
    c.num_samples = 1 << 16;
    c.seed = 100 * round;
    c.first_scale = UsualScale(c.k) - 1;
    MxFp4ActivationRunner runner(c);
    for (int i = 0; i < 2000; ++i) static_cast<void>(runner.Launch());
    problem = runner.Run();
  }
  Report(problem.empty(), "10^7 short tiles", problem);
}

void CheckSmall() { CheckPatterns({{70, 160, 72}, {300, 416, 136}, {70, 1056, 72}}, {3}); }

void CheckAll() {
  CheckPatterns({{1, 128, 64},
                 {3, 32, 8},
                 {70, 160, 72},
                 {300, 416, 136},
                 {700, 1024, 264},
                 {515, 640, 8},
                 {130, 1184, 136},
                 {260, 2080, 392}},
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
                  {{"small", CheckSmall}, {"check", CheckAll}, {"time", TimeMxFp4Activation}});
}
