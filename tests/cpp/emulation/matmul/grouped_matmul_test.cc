// Checks of tests/cpp/gpu/matmul/grouped_matmul_test.cu on a CPU: emulator.h runs the unchanged
// kernels for sm_90a.
//
//   grouped_matmul_test [SEED [all]]
//
//   all   every kind of 16-bit operands, and more heights; otherwise some of the kinds
#include <tuple>

#include "tests/cpp/emulation/for_each.h"

#define JAX_EP_EMULATION
#define main main_of_matmul_test
#include "tests/cpp/gpu/matmul/grouped_matmul_test.cu"
#undef main

#include "tests/cpp/emulation/matmul/matmul_sizes.h"
#include "tests/cpp/emulation/matmul/register_matmuls.h"

namespace harness {
namespace {

// Odd and even numbers of columns of tiles, which have 128 columns, or 256 in weight gradients.
// k-blocks, of 64: one; several; more than the steps of an epilogue.
void CheckEmulated(const Kind& kind) {
  const auto check = [&](const std::vector<int32_t>& sizes, int64_t k, int64_t n, bool zero_tail) {
    const Case c = {.kind = kind,
                    .m = Sum(sizes) + 70,
                    .k = k,
                    .n = n,
                    .sizes = sizes,
                    .zero_tail = zero_tail || kind.is_gradient,
                    .num_sms = zero_tail ? 2 : 4,
                    .tile_counter = zero_tail ? 1 : -1};
    CheckCase(Describe(c, "").c_str(), c);
  };
  check(kAllHeights, 64, 136, true);
  check(kAllHeights, 200, 264, false);
  check(kFewRows, 264, 392, true);
  check({530, 40}, 712, 128, false);
  check({700}, 136, 256, false);  // three pairs for two clusters: the last one is cut
  // Seven pairs for five clusters, the tall group's first: the last two are cut, 64 rows and zeros.
  const std::vector<int32_t> cut = {130, 700, 72, 128};
  for (int32_t counter : {-1, 1}) {
    const Case c = {.kind = kind,
                    .m = Sum(cut) + 150,
                    .k = 136,
                    .n = 256,
                    .sizes = cut,
                    .num_sms = 10,
                    .tile_counter = counter};
    CheckCase(Describe(c, "cut").c_str(), c);
  }
  if (kind.is_gradient || kind.out == kF32) return;  // these have no wide tiles
  check(kSomeRows, 72, 392, true);
  check({100, 90}, 712, 264, true);  // wide tiles one after another; the last half does not exist
  // Four pairs for three clusters: a tall group's two, then two of wide tiles, the last of which is
  // cut. Then few tiles, whose rows are halved.
  const std::vector<int32_t> wide = {100, 200, 90};
  const std::vector<int32_t> few = {66, 150, 30};
  for (const auto& [sizes, n, num_sms] : {std::tuple{wide, 392, 6}, std::tuple{few, 200, 12}}) {
    const Case c = {.kind = kind,
                    .m = Sum(sizes),
                    .k = 200,
                    .n = n,
                    .sizes = sizes,
                    .num_sms = num_sms,
                    .tile_counter = 1};
    CheckCase(Describe(c, "some rows").c_str(), c);
  }
}

}  // namespace
}  // namespace harness

int main(int argc, char** argv) {
  using namespace harness;
  RegisterMatmuls();
  emulation::settings.num_sms = 8;
  emulation::settings.resident_blocks = 4;
  emulation::settings.seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  std::vector<Kind> kinds = {kForward,
                             kTransposed,
                             kRhsGradient,
                             kAccumulation,
                             {true, true, kF16, kF16, kF32},
                             {false, false, kBF16, kBF16, kF32}};
  const bool all = argc > 2;
  if (all) {
    kinds = Kinds();
    std::erase_if(kinds, [](const Kind& k) { return k.lhs == kF32 || k.right != k.lhs; });
  }
  for (const Kind& kind : kinds) CheckEmulated(kind);
  if (all) CheckHeights(true);
  CheckHalfTiles(true);
  return failures == 0 ? 0 : 1;
}
