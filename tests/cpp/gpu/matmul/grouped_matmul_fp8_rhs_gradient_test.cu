// Compares FP8 weight gradients with loops in float64, on the current GPU (compute capability 9.0).
//
//   grouped_matmul_fp8_rhs_gradient_test [MODE]
//
//   check   every check
//   small   small checks, each buffer an allocation of its own: for compute-sanitizer
//   time    with and without transposes, interleaved with the bfloat16 kernel at the same shapes
//   all     check, then time (the default)
//
// Needs 40 GB of free memory for the times.
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "tests/cpp/gpu/matmul/fp8_rhs_gradient_runner.h"
#include "tests/cpp/gpu/matmul/matmul_cases.h"
#include "tests/cpp/gpu/matmul/modes.h"
#include "tests/cpp/gpu/matmul/report.h"
#ifndef JAX_EP_EMULATION  // a CPU's times say nothing
#include "tests/cpp/gpu/matmul/fp8_rhs_gradient_timing.h"
#endif

namespace harness {
namespace {

struct Shape {
  int64_t m, k, n;
};

template <typename Function>
void ForEachForm(const Function& function) {
  for (Numbers numbers : {Numbers::kExact, Numbers::kRandom}) {
    function(Fp8GradientCase{numbers, false, false, 1, 8, 8, {1}});
    function(Fp8GradientCase{numbers, true, false, 1, 8, 8, {1}});
    function(Fp8GradientCase{numbers, true, true, 1, 8, 8, {1}});
  }
}

void CheckPatterns(const std::vector<Shape>& shapes, const std::vector<int>& group_counts) {
  uint64_t index = 0;
  ForEachForm([&](Fp8GradientCase c) {
    int cases = 0;
    int failed = 0;
    double error = 0;
    Fp8GradientRunner runner(c);
    for (const Shape& shape : shapes) {
      for (int groups : group_counts) {
        for (const Pattern& pattern : Patterns(shape.m, groups)) {
          ++index;
          c.m = shape.m, c.k = shape.k, c.n = shape.n;
          c.sizes = pattern.sizes;
          c.seed = index * 10;
          c.num_sms = index % 3 == 0 ? 0 : index % 3 == 1 ? 1 : 5;
          c.tile_counter = index % 5 == 0 ? -1 : static_cast<int32_t>(index % 7);
          runner.Prepare(c);
          ++cases;
          const std::string problem = runner.Run(&error);
          if (problem.empty() || failed++ >= 3) continue;
          std::printf("  %s M=%d K=%d N=%d G=%d %s: %s\n", c.Name().c_str(), int(c.m), int(c.k),
                      int(c.n), groups, pattern.name.c_str(), problem.c_str());
        }
      }
    }
    char text[128];
    std::snprintf(text, sizeof text, "%d of %d cases; worst error 2^%.2f of absolute products",
                  cases - failed, cases, error > 0 ? std::log2(error) : -99.0);
    Report(failed == 0, c.Name(), text);
  });
}

// The shapes that are timed; a sample of each result.
void CheckLarge() {
  for (const Shape& s : {Shape{32768, 7168, 4096}, {32768, 2048, 7168}, {40000, 2304, 1288}}) {
    for (bool accumulates : {false, true}) {
      double error = 0;
      Fp8GradientCase c{Numbers::kRandom,
                        accumulates,
                        accumulates,
                        s.m,
                        s.k,
                        s.n,
                        Cut(s.m - 100, s.m == 40000 ? 8 : 64, 7)};
      c.num_samples = 1 << 16;
      Fp8GradientRunner runner(c);
      const std::string problem = runner.Run(&error);
      Report(problem.empty(), c.Name() + ", K = " + std::to_string(s.k), problem);
    }
  }
}

void CheckDeterminism() {
  bool same = true;
  ForEachForm([&](Fp8GradientCase c) {
    c.m = 3000, c.k = 1040, c.n = 520, c.sizes = Cut(2700, 7, 5);
    Fp8GradientRunner runner(c);
    std::vector<uint8_t> first;
    same = HasSameBits(runner, &first, [&] { runner.FillAccumulators(); }) && same;
  });
  Report(same, "bits do not depend on the run or num_sms", "");
}

// Many short tiles, to find rare races between warps of a cluster.
void CheckManyTiles() {
  std::vector<int32_t> sizes;
  for (int i = 0; i < 64; ++i) sizes.push_back(i * 37 % 300);
  std::string problem;
  double error = 0;
  for (bool accumulates : {false, true}) {
    Fp8GradientCase c{Numbers::kExact, accumulates, false, 16384, 1152, 1024, sizes};
    c.num_samples = 1 << 16;
    Fp8GradientRunner runner(c);
    for (int i = 0; i < 2000; ++i) static_cast<void>(runner.Launch());
    problem += runner.Run(&error);
  }
  Report(problem.empty(), "5 * 10^6 short tiles", problem);
}

void CheckSmall() { CheckPatterns({{70, 144, 136}, {300, 400, 264}, {1500, 136, 136}}, {3}); }

void CheckAll() {
  CheckPatterns({{1, 128, 128},
                 {70, 144, 136},
                 {300, 400, 264},
                 {700, 1024, 512},
                 {515, 640, 8},
                 {1300, 7, 136},
                 {5200, 136, 1288},
                 {2600, 392, 264}},
                {1, 5, 40});
  CheckLarge();
  CheckDeterminism();
  CheckManyTiles();
}

}  // namespace
}  // namespace harness

#ifndef JAX_EP_EMULATION  // does not time
int main(int argc, char** argv) {
  using namespace harness;
  return RunModes(argc, argv,
                  {{"small", CheckSmall}, {"check", CheckAll}, {"time", TimeGradients}});
}
#endif
