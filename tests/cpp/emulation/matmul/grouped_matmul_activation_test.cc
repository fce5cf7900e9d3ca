// Checks of tests/cpp/gpu/matmul/grouped_matmul_activation_test.cu on a CPU: emulator.h runs the
// unchanged kernels for sm_90a.
//
//   grouped_matmul_activation_test [SEED [all]]
//
//   all   every kind, with both types; otherwise some of them
#include "tests/cpp/emulation/for_each.h"

#define main main_of_activation_test
#include "tests/cpp/gpu/matmul/grouped_matmul_activation_test.cu"
#undef main

#include "tests/cpp/emulation/matmul/matmul_sizes.h"
#include "tests/cpp/emulation/matmul/register_matmuls.h"

namespace harness {
namespace {

// Odd and even numbers of columns of tiles, which have 64 columns of gated activations, otherwise
// 128. k-blocks, of 64: one; several; more than the slices of an epilogue.
std::vector<FusedCase> EmulatedCases(uint64_t seed) {
  std::vector<FusedCase> cases;
  const auto add = [&](const Pattern& pattern, int64_t k, int64_t f, uint32_t options,
                       int64_t num_sms = 0) {
    if (num_sms == 0) num_sms = options % 3 == 0 ? 2 : 4;
    const int64_t m = Sum(pattern.sizes) + 20;
    cases.push_back({.m = m,
                     .k = k,
                     .f = f,
                     .pattern = pattern,
                     .keeps = options % 2 != 0,
                     .has_weights = options / 2 % 2 != 0,
                     .has_bias = options / 4 % 2 != 0,
                     .num_sms = num_sms,
                     .tile_counter = options % 5 == 0 ? -1 : 1,
                     .seed = seed * 16 + options});
  };
  add({"all heights", kAllHeights}, 64, 136, 7);
  add({"all heights", kAllHeights}, 200, 72, 0);
  add({"few rows", kFewRows}, 264, 200, 6);
  add({"some rows", kSomeRows}, 136, 392, 7);
  add({"some rows", {66, 100}}, 712, 392, 3);
  add({"few tiles", {66, 150}}, 200, 128, 7, 8);
  add({"wide, last pairs cut", {100, 200, 90}}, 136, 392, 7, 12);
  add({"one tile after another", {530, 40}}, 1096, 136, 5);
  // Three pairs for two clusters, gated and not: the last one is cut.
  add({"last pair cut", {700}}, 72, 128, 7);
  add({"last pair cut", {700}}, 72, 256, 7);
  return cases;
}

}  // namespace
}  // namespace harness

int main(int argc, char** argv) {
  using namespace harness;
  RegisterMatmuls();
  emulation::settings.resident_blocks = 4;
  emulation::settings.seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const bool all = argc > 2;
  for (const FusedKind& kind : FusedKinds()) {
    const bool is_chosen = kind.type == kBF16 && (kind.activation == Activation::kSwiglu ||
                                                  kind.activation == Activation::kSilu ||
                                                  kind.activation == Activation::kNone);
    if (all || is_chosen) CheckKind(kind, EmulatedCases(emulation::settings.seed), 1);
  }
  return failures == 0 ? 0 : 1;
}
