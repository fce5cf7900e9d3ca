// Compares the kernels of ffi/kernels/matmul/grouped_matmul_activation.h with loops in float64 on
// the host, on the current GPU.
//
//   grouped_matmul_activation_test [MODE [CASES [SEED]]]
//
//   check   every check (the default). CASES of each kind, of two launches each; 44 have all shapes
//   small   51 small launches, each buffer an allocation of its own: for compute-sanitizer
#include <cstdlib>
#include <string>
#include <vector>

#include "ffi/kernels/matmul/launch.h"
#include "tests/cpp/gpu/matmul/grouped_matmul_activation_runner.h"

namespace harness {
namespace {

int failures = 0;

// Runs a case twice, without the options that its kind lacks. The second launch has other numbers
// and the same counter, which the first must have reset to zero.
void CheckKind(const FusedKind& kind, const std::vector<FusedCase>& cases, int launches,
               const char* what = "") {
  FusedRunner runner(kind);
  Tally total;
  int failed = 0;
  for (FusedCase c : cases) {
    c.keeps = c.keeps && !kind.is_gradient && kind.activation != Activation::kNone;
    c.has_bias = c.has_bias && !kind.is_gradient;
    for (int launch = 0; launch < launches; ++launch, ++c.seed) {
      const Tally tally = runner.Run(c);
      total.Add(tally);
      if (tally.wrong == 0 || failed++ >= 3) continue;
      std::printf("  launch %d of %s: %lld wrong; %s\n", launch, Describe(c).c_str(),
                  static_cast<long long>(tally.wrong), tally.problem.c_str());
    }
  }
  std::printf("%s %s%s: %d of %zu launches; of %lld numbers %.1f %% were known to the bit\n",
              failed == 0 ? "PASS" : "FAIL", kind.Name().c_str(), what,
              static_cast<int>(cases.size()) * launches - failed, cases.size() * launches,
              static_cast<long long>(total.numbers),
              100.0 * static_cast<double>(total.certain) /
                  static_cast<double>(std::max<int64_t>(total.numbers, 1)));
  std::fflush(stdout);
  if (failed != 0) ++failures;
}

int Main(const std::string& mode, int num_cases, uint64_t seed) {
  const bool is_small = mode == "small";
  if (!is_small && mode != "check") {
    std::printf("FAIL there is no mode %s; expected check or small\n", mode.c_str());
    return 1;
  }
  if (const jax_ep::Status status = jax_ep::LoadMatmulKernels(); !status.ok()) {
    std::printf("FAIL loading: %s\n", status.message.c_str());
    return 1;
  }
  GuardedBuffer::exact = is_small;
  int index = 0;
  for (const FusedKind& kind : FusedKinds()) {
    std::vector<FusedCase> cases;
    // One type of each, in turn.
    const bool is_odd = (static_cast<int>(kind.activation) + kind.is_gradient) % 2 != 0;
    if (is_small && is_odd != (kind.type == kF16)) continue;
    for (int i = 0; i < (is_small ? 3 : num_cases); ++i, ++index) {
      const uint64_t case_seed = seed << 32 | static_cast<uint64_t>(index) << 1;
      cases.push_back(is_small ? MakeSmallCase(case_seed, index) : MakeCase(case_seed, i));
    }
    CheckKind(kind, cases, is_small ? 1 : 2);
  }
  for (const FusedKind& kind : {FusedKind{false, Activation::kSwiglu, kBF16},
                                {false, Activation::kSilu, kF16},
                                {false, Activation::kNone, kBF16},
                                {true, Activation::kSwiglu, kBF16},
                                {true, Activation::kSilu, kF16}}) {
    CheckKind(kind, MakeHeightCases(seed << 32 | 1, is_small), 1, " every height");
  }
  std::printf("%s grouped_matmul_activation_test: %s\n", failures == 0 ? "PASS" : "FAIL",
              mode.c_str());
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace harness

int main(int argc, char** argv) {
  return harness::Main(argc > 1 ? argv[1] : "check", argc > 2 ? std::atoi(argv[2]) : 44,
                       argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
}
