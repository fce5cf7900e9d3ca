// Compares the FP8 grouped matmul with loops in float64, on the current GPU (compute capability
// 9.0).
//
//   grouped_matmul_fp8_test [MODE]
//
//   check   every check
//   small   small checks, each buffer an allocation of its own: for compute-sanitizer
//   time    TFLOP/s, interleaved with the bfloat16 kernel at the same shapes
//   all     check, then time (the default); about 45 s
//
// Needs 12 GB of free memory.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "tests/cpp/gpu/matmul/fp8_activation_runner.h"
#include "tests/cpp/gpu/matmul/fp8_runner.h"
#include "tests/cpp/gpu/matmul/matmul_timing.h"
#include "tests/cpp/gpu/matmul/modes.h"
#include "tests/cpp/gpu/matmul/report.h"

namespace harness {
namespace {

struct Shape {
  int64_t m, k, n;
};

template <typename Function>
void ForEachFormat(const Function& function) {
  for (Numbers numbers : {Numbers::kExact, Numbers::kRandom}) {
    for (Fp8Kind kind : {Fp8Kind::kBlock128, Fp8Kind::kRow, Fp8Kind::kRowE5M2}) {
      for (bool out_is_float32 : {true, false}) {
        function(Fp8Case{kind, numbers, out_is_float32, 1, 16, 8, {1}});
      }
    }
  }
}

void CheckPatterns(const std::vector<Shape>& shapes, const std::vector<int>& group_counts) {
  uint64_t index = 0;
  ForEachFormat([&](Fp8Case c) {
    int cases = 0;
    int failed = 0;
    double error = 0;
    Fp8Runner runner(c);
    for (const Shape& shape : shapes) {
      for (int groups : group_counts) {
        for (const Pattern& pattern : Patterns(shape.m, groups)) {
          ++index;
          c.m = shape.m, c.k = shape.k, c.n = shape.n;
          c.sizes = pattern.sizes;
          c.seed = index * 10;
          c.zero_tail = index % 2 == 0;
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

void CheckActivations(const std::vector<Shape>& shapes, const std::vector<int>& group_counts) {
  uint64_t index = 0;
  for (Numbers numbers : {Numbers::kExact, Numbers::kRandom}) {
    int cases = 0;
    int failed = 0;
    for (const Shape& shape : shapes) {
      for (int groups : group_counts) {
        for (const Pattern& pattern : Patterns(shape.m, groups)) {
          ++index;
          Fp8ActivationCase c{numbers, shape.m, shape.k, shape.n, pattern.sizes};
          c.seed = index * 10;
          c.is_geglu = index % 2 == 0;
          c.is_power_of_two = index % 3 == 0;
          c.has_weights = index / 2 % 2 == 0;
          c.keeps = index / 3 % 2 == 0;
          c.num_sms = index % 3 == 0 ? 0 : index % 3 == 1 ? 1 : 5;
          c.tile_counter = index % 5 == 0 ? -1 : static_cast<int32_t>(index % 7);
          if (index % 4 == 0 && Rows(c.sizes, c.m).end > 3) c.nan_row = 2;
          Fp8ActivationRunner runner(c);
          ++cases;
          const std::string problem = runner.Run();
          if (problem.empty() || failed++ >= 3) continue;
          std::printf("  M=%d K=%d F=%d G=%d %s: %s\n", int(c.m), int(c.k), int(c.f), groups,
                      pattern.name.c_str(), problem.c_str());
        }
      }
    }
    Report(failed == 0, numbers == Numbers::kExact ? "activation, exact" : "activation, random",
           std::to_string(cases - failed) + " of " + std::to_string(cases) + " cases");
  }
}

// The shapes that are timed; a sample of each result.
void CheckLarge() {
  for (const Shape& s : {Shape{32768, 7168, 4096}, {32768, 2048, 7168}, {5000, 2304, 1288}}) {
    double error = 0;
    Fp8Case c{Fp8Kind::kBlock128, Numbers::kRandom, true, s.m, s.k, s.n, Draw(s.m, 16, 0)};
    c.num_samples = 1 << 17;
    Fp8Runner runner(c);
    const std::string problem = runner.Run(&error);
    char text[96];
    std::snprintf(text, sizeof text, "worst error 2^%.2f of absolute products %s", std::log2(error),
                  problem.c_str());
    Report(problem.empty(), "K = " + std::to_string(s.k), text);
  }
}

void CheckDeterminism() {
  bool same = true;
  ForEachFormat([&](Fp8Case c) {
    c.m = 3000, c.k = 1040, c.n = 520, c.sizes = Cut(2700, 7, 5);
    Fp8Runner runner(c);
    std::vector<uint8_t> first;
    same = HasSameBits(runner, &first, [] {}) && same;
  });
  Report(same, "bits do not depend on the run or num_sms", "");
}

void CheckLargeActivations() {
  for (const Shape& s : {Shape{32768, 7168, 2048}, {32768, 2048, 768}}) {
    Fp8ActivationCase c{Numbers::kRandom, s.m, s.k, s.n, Draw(s.m, 16, 0)};
    c.num_samples = 1 << 12;
    const std::string problem = Fp8ActivationRunner(c).Run();
    Report(problem.empty(), "activation, K = " + std::to_string(s.k), problem);
  }
}

void CheckDeterminismOfActivations() {
  bool same = true;
  Fp8ActivationCase c{Numbers::kRandom, 3000, 1040, 384, Cut(2700, 7, 5)};
  std::vector<uint8_t> first;
  for (bool keeps : {false, true}) {
    c.keeps = keeps;
    Fp8ActivationRunner runner(c);
    same = HasSameBits(runner, &first, [] {}) && same;
  }
  Report(same, "bits of activations do not depend on the run, num_sms or what is kept", "");
}

// Many short tiles, to find rare races between warps of a cluster.
void CheckManyTiles() {
  std::vector<int32_t> sizes;
  for (int i = 0; i < 64; ++i) sizes.push_back(40 + i * 13 % 149);
  Fp8Case c{Fp8Kind::kBlock128, Numbers::kExact, false, 8192, 128, 4096, sizes};
  c.num_samples = 1 << 16;
  std::string problem;
  double error = 0;
  for (int round = 0; round < 4 && problem.empty(); ++round) {
    c.k = 128 + 256 * round;
    c.seed = 100 * round;
    Fp8Runner runner(c);
    for (int i = 0; i < 2000; ++i) static_cast<void>(runner.Launch());
    problem = runner.Run(&error);
  }
  Report(problem.empty(), "10^7 short tiles", problem);
}

// ---- timing: the kernels of one shape take turns

float Milliseconds(const std::function<void()>& launch, int count) {
  cudaEvent_t begin, end;
  Require(cudaEventCreate(&begin), "an event");
  Require(cudaEventCreate(&end), "an event");
  Require(cudaEventRecord(begin), "an event");
  for (int i = 0; i < count; ++i) launch();
  Require(cudaEventRecord(end), "an event");
  Require(cudaEventSynchronize(end), "the kernels");
  float milliseconds = 0;
  Require(cudaEventElapsedTime(&milliseconds, begin, end), "an event");
  Require(cudaEventDestroy(begin), "an event");
  Require(cudaEventDestroy(end), "an event");
  return milliseconds / static_cast<float>(count);
}

void TimeShape(const Shape& s, const char* name, const std::vector<int32_t>& sizes) {
  const auto fp8 = [&](Fp8Kind kind) {
    return Fp8Case{kind, Numbers::kRandom, false, s.m, s.k, s.n, sizes};
  };
  const Fp8Runner block(fp8(Fp8Kind::kBlock128));
  const Fp8Runner row(fp8(Fp8Kind::kRow));
  const Runner bfloat16({.kind = kTransposed, .m = s.m, .k = s.k, .n = s.n, .sizes = sizes});
  const std::vector<std::function<void()>> launches = {
      [&] { static_cast<void>(bfloat16.Launch()); }, [&] { static_cast<void>(block.Launch()); },
      [&] { static_cast<void>(row.Launch()); }};
  const int count = std::max(1, static_cast<int>(150 / Milliseconds(launches[0], 3)));
  std::vector<std::vector<float>> times(launches.size());
  for (int round = 0; round < 5; ++round) {
    for (size_t i = 0; i < launches.size(); ++i) {
      times[i].push_back(Milliseconds(launches[i], count));
    }
  }
  const double flops = 2.0 * static_cast<double>(Rows(sizes, s.m).end) * s.k * s.n;
  const double matrices = static_cast<double>(sizes.size()) * s.k * s.n;
  std::printf("M=%-6d K=%-5d N=%-5d %3zu %-12s", int(s.m), int(s.k), int(s.n), sizes.size(), name);
  const char* const names[] = {"bf16", "block128", "row"};
  for (size_t i = 0; i < times.size(); ++i) {
    std::sort(times[i].begin(), times[i].end());
    const double median = times[i][times[i].size() / 2];
    std::printf("  %s %.3f ms %.0f TFLOP/s", names[i], median, flops / median * 1e-9);
    if (s.m <= 512) std::printf(" %.2f TB/s", matrices * (i == 0 ? 2 : 1) / median * 1e-9);
  }
  std::printf("  block128/bf16 %.2f x\n", times[0][2] / times[1][2]);
  std::fflush(stdout);
}

void TimeFp8() {
  const auto even = [](int64_t rows, int groups) {
    return std::vector<int32_t>(groups, static_cast<int32_t>(rows / groups));
  };
  const auto start = std::chrono::steady_clock::now();
  {
    const Fp8Runner warm_up(
        {Fp8Kind::kBlock128, Numbers::kRandom, false, 32768, 7168, 4096, even(32768, 64)});
    while (std::chrono::steady_clock::now() - start < std::chrono::seconds(7)) {
      for (int i = 0; i < 50; ++i) static_cast<void>(warm_up.Launch());
      Require(cudaDeviceSynchronize(), "the kernels");
    }
  }
  TimeShape({32768, 7168, 4096}, "even", even(32768, 64));
  TimeShape({32768, 7168, 4096}, "multinomial", Draw(32768, 64, 0));
  TimeShape({32768, 2048, 7168}, "even", even(32768, 64));
  TimeShape({32768, 2048, 7168}, "multinomial", Draw(32768, 64, 0));
  TimeShape({32768, 2048, 1536}, "even", even(32768, 32));
  TimeShape({32768, 768, 2048}, "even", even(32768, 32));
  TimeShape({512, 7168, 4096}, "8 rows each", even(512, 64));
}

void CheckSmall() {
  CheckPatterns({{70, 144, 136}, {300, 400, 264}, {70, 1040, 136}}, {3});
  CheckActivations({{70, 144, 128}, {300, 400, 256}}, {3});
}

void CheckAll() {
  CheckPatterns({{1, 128, 128},
                 {70, 144, 136},
                 {300, 400, 264},
                 {700, 1024, 512},
                 {515, 640, 8},
                 {130, 1168, 136},
                 {130, 1392, 136},
                 {130, 1536, 136},
                 {260, 2064, 392}},
                {1, 5, 40});
  CheckLarge();
  CheckDeterminism();
  CheckActivations({{1, 128, 128}, {70, 144, 384}, {300, 400, 256}, {700, 1024, 512}}, {1, 5, 40});
  CheckLargeActivations();
  CheckDeterminismOfActivations();
  CheckManyTiles();
}

}  // namespace
}  // namespace harness

int main(int argc, char** argv) {
  using namespace harness;
  return RunModes(argc, argv, {{"small", CheckSmall}, {"check", CheckAll}, {"time", TimeFp8}});
}
