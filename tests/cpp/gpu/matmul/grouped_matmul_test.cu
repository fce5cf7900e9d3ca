// Compares the kernels of ffi/kernels/matmul/grouped_matmul.h with loops in float64, on the current
// GPU.
//
//   grouped_matmul_test [MODE [N]]
//
//   check   every check (the default). N: only every Nth of the random cases
//   small   small checks, each buffer an allocation of its own: for compute-sanitizer
//   time    TFLOP/s, on inputs that the L2 cache does not hold
//   all     check, then time
//
// Needs 12 GB of free memory for check and 20 GB for time.
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/cpp/gpu/matmul/matmul_runner.h"
#include "tests/cpp/gpu/matmul/report.h"
#ifndef JAX_EP_EMULATION  // a CPU's times say nothing
#include "tests/cpp/gpu/matmul/matmul_timing.h"
#endif

namespace harness {
namespace {

std::string Describe(const Case& c, const std::string& pattern) {
  char text[256];
  std::snprintf(text, sizeof text, "%s M=%lld K=%lld N=%lld G=%zu %s zero_tail=%d num_sms=%lld%s",
                c.kind.Name().c_str(), static_cast<long long>(c.m), static_cast<long long>(c.k),
                static_cast<long long>(c.n), c.sizes.size(), pattern.c_str(), c.zero_tail,
                static_cast<long long>(c.num_sms), c.misaligned ? " misaligned" : "");
  return text;
}

// ---- every kind on many shapes and group sizes

struct Total {
  int cases = 0;
  int failed = 0;
  double excess = 0;
  double error = 0;
};

struct Shape {
  int64_t m, k, n;
  bool misaligned = false;
};

void CheckPatterns(const std::vector<Shape>& shapes, const std::vector<int>& group_counts,
                   int every) {
  uint64_t index = 0;
  for (const Kind& kind : Kinds()) {
    Total total;
    Case c{.kind = kind, .m = 0, .k = 0, .n = 0, .sizes = {}};
    Runner runner({.kind = kind, .m = 1, .k = 1, .n = 1, .sizes = {1}});
    for (const Shape& shape : shapes) {
      for (int groups : group_counts) {
        for (const Pattern& pattern : Patterns(shape.m, groups)) {
          ++index;
          if (every > 1 && Hash(77, index) % every != 0) continue;
          c.m = shape.m, c.k = shape.k, c.n = shape.n;
          c.sizes = pattern.sizes;
          c.misaligned = shape.misaligned;
          c.zero_tail = kind.is_gradient || index % 2 == 0;
          c.num_sms = index % 3 == 0 ? 0 : index % 3 == 1 ? 1 : 5;
          c.tile_counter = index % 5 == 0 ? -1 : static_cast<int32_t>(index % 7);
          runner.Prepare(c);
          const Outcome outcome = runner.Run();
          ++total.cases;
          total.excess = std::max(total.excess, outcome.excess);
          total.error = std::max(total.error, outcome.error);
          if (!outcome.ok && total.failed++ < 3) {
            std::printf("  %s: %s\n", Describe(c, pattern.name).c_str(), outcome.problem.c_str());
          }
        }
      }
    }
    char text[160];
    std::snprintf(text, sizeof text,
                  "%d of %d cases; worst error %.2g of the sum of absolute products, %.2f of the "
                  "tolerance",
                  total.cases - total.failed, total.cases, total.error, total.excess);
    Report(total.failed == 0, kind.Name(), text);
  }
}

// ---- single properties

void CheckEmptyShapes() {
  int failed = 0;
  int cases = 0;
  for (const Kind& kind : Kinds()) {
    for (const Shape& s : {Shape{0, 64, 64}, {70, 0, 64}, {70, 64, 0}, {0, 0, 0}}) {
      Runner runner({.kind = kind, .m = s.m, .k = s.k, .n = s.n, .sizes = {30, 0, 20}});
      ++cases;
      if (const Outcome outcome = runner.Run(); !outcome.ok) {
        ++failed;
        std::printf("  %s M=%d K=%d N=%d: %s\n", kind.Name().c_str(), int(s.m), int(s.k), int(s.n),
                    outcome.problem.c_str());
      }
    }
  }
  Report(failed == 0, "sizes of zero", std::to_string(cases) + " cases");
}

void CheckDeterminism(int64_t m, int64_t k, int64_t n) {
  bool same = true;
  for (const Kind& kind : Kinds()) {
    Runner runner({.kind = kind, .m = m, .k = k, .n = n, .sizes = Cut(m * 9 / 10, 7, 5)});
    std::vector<uint8_t> first;
    same = HasSameBits(runner, &first, [&] { runner.ClearOut(); }) && same;
  }
  Report(same, "bits do not depend on the run or num_sms", "");
}

void CheckMessages() {
  using jax_ep::GroupedMatmulSizes;
  bool ok = true;
  jax_ep::GroupedMatmulConfig config;
  const auto expect = [&](const char* what, GroupedMatmulSizes sizes, bool gradient) {
    const jax_ep::Status status =
        (gradient ? jax_ep::LaunchGroupedMatmulRhsGradient : jax_ep::LaunchGroupedMatmul)(
            config, sizes, nullptr, nullptr, nullptr, nullptr, -1, nullptr);
    std::printf("  %s: %s\n", what, status.message.c_str());
    ok = ok && !status.ok();
  };
  expect("f32 lhs, bf16 rhs", {2, 8, 8, 8, kF32, kBF16, kF32}, false);
  expect("f16 lhs, bf16 rhs", {2, 8, 8, 8, kF16, kBF16, kF16}, false);
  expect("bf16 lhs, f16 result", {2, 8, 8, 8, kBF16, kBF16, kF16}, false);
  expect("bf16 lhs, f32 out_gradient", {2, 8, 8, 8, kBF16, kBF16, kF32}, true);
  config.has_accumulator = true;
  expect("bf16 accumulator", {2, 8, 8, 8, kBF16, kBF16, kBF16}, true);
  config.has_accumulator = false;
  expect("no type", {2, 8, 8, 8, jax_ep::kOther, kBF16, kF32}, true);
  expect("too many rows", {2, int64_t{1} << 31, 8, 8, kBF16, kBF16, kBF16}, false);
  config.num_sms = -1;
  expect("num_sms of -1", {2, 8, 8, 8, kBF16, kBF16, kBF16}, false);
  Report(ok, "what cannot run is an error with a message", "");
}

void CheckGraph() {
  bool ok = true;
  for (const Kind& kind : Kinds()) {
    Case c{.kind = kind, .m = 700, .k = 136, .n = 264, .sizes = Cut(600, 9, 6)};
    for (int32_t& size : c.sizes) ++size;  // every matrix of rhs has numbers
    Runner runner(c);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    Require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    Require(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    ok = ok && runner.Launch(stream).ok();
    Require(cudaStreamEndCapture(stream, &graph), "capture");
    Require(cudaGraphInstantiate(&executable, graph, 0), "instantiate");
    const auto end = Rows(c.sizes, c.m).end;  // rows past it are NaN
    for (const std::vector<int32_t>& sizes :
         {c.sizes, Cut(end, 9, 7), Cut(end / 2, 9, 8), std::vector<int32_t>(9, 0)}) {
      runner.SetSizes(sizes);
      runner.ClearOut();
      Require(cudaDeviceSynchronize(), "setting up");
      Require(cudaGraphLaunch(executable, stream), "replay");
      ok = ok && runner.Check().ok;
    }
    Require(cudaGraphExecDestroy(executable), "destroy");
    Require(cudaGraphDestroy(graph), "destroy");
    Require(cudaStreamDestroy(stream), "destroy");
  }
  Report(ok, "a captured launch follows the group sizes", "");
}

// Checks a sample of so large a result.
Case Sampled(const Kind& kind, int64_t m, int64_t k, int64_t n, const std::vector<int32_t>& sizes) {
  return {.kind = kind, .m = m, .k = k, .n = n, .sizes = sizes, .num_samples = 1 << 18};
}

void CheckCase(const char* what, const Case& c) {
  Runner runner(c);
  const Outcome outcome = runner.Run();
  char text[128];
  std::snprintf(text, sizeof text, "worst error %.2g, %.2f of the tolerance %s", outcome.error,
                outcome.excess, outcome.problem.c_str());
  Report(outcome.ok, what, text);
}

// Many k-blocks per tile, and group sizes on both sides of a tile's.
void CheckUneven() {
  // More k-blocks than stages, and pairs in which one tile has a half, or nothing.
  std::vector<int32_t> uneven;
  for (int i = 0; i < 60; ++i) uneven.push_back(i % 2 ? 1 + i * 29 % 64 : 65 + i * 97 % 256);
  const int64_t rows = Sum(uneven);
  CheckCase("uneven", Sampled(kForward, rows, 2304, 1288, uneven));
  for (const Kind& kind : {kRhsGradient, kAccumulation}) {
    CheckCase("uneven gradient", Sampled(kind, rows, 576, 1200, uneven));
  }
  // Many more k-blocks than stages, and a last one that is not whole.
  CheckCase("long gradient", Sampled(kRhsGradient, 6000, 576, 1200,
                                     {1000, 17, 530, 1333, 64, 70, 1025, 511, 1, 0, 900}));
}

// Kinds for tiles whose rows are any number: both operations, results of 16 and of 32 bits.
const Kind kTileKinds[] = {
    kForward, kTransposed, {false, false, kF16, kF16, kF32}, {false, true, kF16, kF16, kF32}};

// Tiles of every height, in an odd and in an even number of columns of them, and rows past the last
// group.
void CheckHeights(bool is_small) {
  const std::vector<int32_t> every =
      is_small ? std::vector{1, 17, 64, 65, 200, 257} : EverySize(300);
  const std::vector<int32_t> several = is_small ? std::vector{530} : SizesOfSeveralTiles();
  for (const Kind& kind : kTileKinds) {
    for (int64_t n : {264, 392}) {  // three columns of tiles, four
      CheckCase("every height", {.kind = kind,
                                 .m = Sum(every) + 70,
                                 .k = 136,
                                 .n = n,
                                 .sizes = every,
                                 .num_sms = is_small ? 4 : 0});  // few tiles would be halves
      CheckCase("several tiles",
                {.kind = kind, .m = Sum(several) + 20, .k = 136, .n = n, .sizes = several});
    }
  }
}

// Few tiles: the launch halves their columns or, of more than 64 rows, their rows, if the halves
// occupy more SMs. One cluster is too few, and has to compute the same bits.
void CheckHalfTiles(bool is_small) {
  int cases = 0;
  int failed = 0;
  const auto check = [&](const Case& c) {
    ++cases;
    Runner runner(c);
    Outcome outcome = runner.Run();
    const std::vector<uint8_t> bits = runner.Result();
    runner.SetNumSms(2);
    runner.ClearOut();
    if (!runner.Launch().ok() || runner.Result() != bits) outcome.problem += " other bits";
    if (outcome.problem.empty() || failed++ >= 3) return;
    std::printf("  %s: %s\n", Describe(c, "half tiles").c_str(), outcome.problem.c_str());
  };
  const std::vector<int64_t> columns =
      is_small ? std::vector<int64_t>{136} : std::vector<int64_t>{8, 64, 128, 136, 200, 264, 1024};
  const std::vector<int64_t> contracted =  // a stage has 128 k
      is_small ? std::vector<int64_t>{72} : std::vector<int64_t>{64, 136, 1288};
  for (const Kind& kind : kTileKinds) {
    for (int64_t n : columns) {
      for (int64_t k : contracted) {
        for (int32_t rows = 1; rows <= 64; rows += is_small ? 40 : 7) {
          check({.kind = kind, .m = 70, .k = k, .n = n, .sizes = {rows, 65 - rows}});
          check({.kind = kind, .m = 400, .k = k, .n = n, .sizes = {64 + rows, 130 + 2 * rows}});
        }
      }
    }
    // Half tiles after whole ones in the same clusters, and more k-blocks than stages: the second
    // consumer warpgroup, which has nothing to multiply, still has results of the whole ones. A
    // deadlock shows in any launch.
    for (int32_t rows : {16, 100, 200}) {
      check({.kind = kind, .m = 900, .k = 1288, .n = 128, .sizes = {600, rows}, .num_sms = 4});
    }
    if (is_small) continue;
    for (int32_t rows : {600, 1000, 1537}) {
      check({.kind = kind, .m = 1700, .k = 2312, .n = 512, .sizes = {rows, 16}, .num_sms = 16});
      check({.kind = kind, .m = 1700, .k = 2312, .n = 512, .sizes = {16, rows}, .num_sms = 16});
    }
  }
  Report(failed == 0, "half tiles", std::to_string(cases) + " cases");
}

// Some 10^8 tiles of one or two k-blocks, to find rare races between warps of a cluster. A deadlock
// shows in any launch; a wrong result shows in the last launch of a round.
void CheckManyTiles() {
  std::vector<int32_t> sizes;
  for (int i = 0; i < 64; ++i) sizes.push_back(45 + i * 13 % 49);
  const int64_t rows = Sum(sizes);
  for (const Case& c :
       {Sampled(kRhsGradient, rows, 2304, 2048, sizes), Sampled(kForward, rows, 128, 2048, sizes),
        Sampled(kTransposed, rows, 72, 3976, sizes),
        Sampled(kForward, 380, 4096, 2048, {100, 90, 120, 70})}) {
    Runner runner(c);
    Outcome outcome;
    for (int round = 0; round < 20 && outcome.ok; ++round) {
      runner.ClearOut();
      jax_ep::Status status;
      for (int i = 0; i < 500 && status.ok(); ++i) status = runner.Launch();
      outcome = status.ok() ? runner.Check() : Outcome{.ok = false, .problem = status.message};
    }
    Report(outcome.ok, "many short tiles of " + c.kind.Name(), outcome.problem);
  }
}

// More than 2^31 elements, and 4 times as many bytes, in every operand and result; then rows of
// more than 2^25, and as many rows as fit.
void CheckLarge() {
  const int64_t rows = (int64_t{1} << 20) + 77;
  const Kind float32_rhs = {false, true, kBF16, kF32, kBF16};
  const Kind float32 = {false, false, kF32, kF32, kF32};
  const Kind float32_gradient = {true, true, kF32, kF32, kF32};
  CheckCase("large lhs", Sampled(kForward, rows, 2304, 64, Cut(rows - 1000, 512, 9)));
  CheckCase("large result", Sampled(kTransposed, rows, 64, 2304, Cut(rows - 1000, 500, 10)));
  CheckCase("large rhs", Sampled(kForward, 4096, 2304, 2048, Cut(4000, 512, 11)));
  CheckCase("large float32 rhs", Sampled(float32_rhs, 4096, 2304, 2048, Cut(4000, 512, 11)));
  CheckCase("large gradient", Sampled(kRhsGradient, 65536, 2304, 2048, Cut(65000, 512, 12)));
  CheckCase("large accumulator", Sampled(kAccumulation, 65536, 2304, 2048, Cut(65000, 512, 12)));
  CheckCase("large float32", Sampled(float32, rows, 2304, 16, Cut(rows - 1000, 512, 9)));
  CheckCase("large float32 gradient",
            Sampled(float32_gradient, 4096, 2304, 2048, Cut(4000, 512, 12)));
  CheckCase("wide result", Sampled(kForward, 40, 24, (1 << 25) + 72, {17, 9, 0, 12}));
  CheckCase("tall", Sampled(kForward, 1 << 28, 8, 8, Cut((1 << 28) - 1000, 512, 13)));
}

int Main(const std::string& mode, int every) {
  const bool checks = mode == "check" || mode == "all";
  const bool is_small = mode == "small";
  if (!checks && !is_small && mode != "time") {
    std::printf("FAIL there is no mode %s; expected check, small, time or all\n", mode.c_str());
    return 1;
  }
  if (const jax_ep::Status status = jax_ep::LoadMatmulKernels(); !status.ok()) {
    Report(false, "loading", status.message);
  } else if (is_small) {
    GuardedBuffer::exact = true;
    CheckPatterns(
        {{200, 72, 264, false}, {90, 72, 264, false}, {130, 33, 35, false}, {70, 40, 48, true}},
        {3}, std::max(every, 4));
    CheckEmptyShapes();
    CheckHeights(is_small);
    CheckHalfTiles(is_small);
  } else if (checks) {
    // Multiples of 16 bytes, with few and with many rows per group, an odd and an even number of
    // tiles both ways, the last a half or more; whole tiles; nothing even; single elements;
    // misaligned addresses.
    CheckPatterns({{300, 64, 72, false},
                   {1100, 136, 776, false},
                   {300, 320, 520, false},
                   {300, 352, 264, false},
                   {257, 200, 520, false},
                   {513, 96, 256, false},
                   {130, 33, 7, false},
                   {200, 71, 261, false},
                   {140, 36, 132, false},
                   {64, 1, 1, false},
                   {150, 40, 264, true}},
                  {1, 5, 40, 64}, every);
    CheckEmptyShapes();
    CheckMessages();
    CheckDeterminism(300, 136, 272);
    CheckGraph();
    CheckUneven();
    CheckHeights(is_small);
    CheckHalfTiles(is_small);
    CheckManyTiles();
    CheckLarge();
  }
#ifndef JAX_EP_EMULATION
  if (failures == 0 && (mode == "time" || mode == "all")) TimeAll();
#endif
  std::printf("%s grouped_matmul_test: %s\n", failures == 0 ? "PASS" : "FAIL", mode.c_str());
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace harness

int main(int argc, char** argv) {
  return harness::Main(argc > 1 ? argv[1] : "check", argc > 2 ? std::atoi(argv[2]) : 1);
}
