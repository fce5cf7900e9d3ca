// Checks of tests/cpp/gpu/matmul/grouped_matmul_fp8_rhs_gradient_test.cu on a CPU: emulator.h runs
// the unchanged kernels for sm_90a.
//
//   fp8_rhs_gradient_test [SEED]
#include "cuda_runtime_api.h"
#include "ffi/kernels/matmul/portable/kernels.h"
#include "ffi/kernels/matmul/sm90/grouped_matmul_fp8_rhs_gradient.cu"
#include "tests/cpp/emulation/for_each.h"

#define JAX_EP_EMULATION
#include "tests/cpp/gpu/matmul/grouped_matmul_fp8_rhs_gradient_test.cu"

namespace jax_ep {

// These are not emulated here.
MatmulKernel Portable16BitMatmulKernel(bool, MatmulKind, bool) { return {}; }
MatmulKernel PortableFloat32MatmulKernel(MatmulKind) { return {}; }
MatmulKernel PortableActivationGradientKernel(ElementType) { return {}; }
Sm90Kernel Sm90RhsGradientKernel(bool) { return {}; }
Sm90Kernel Sm90SwappedMatmulKernel(bool, MatmulKind) { return {}; }
Sm90Kernel Fp8MatmulKernel(Fp8Kind, bool) { return {}; }
Sm90Kernel Fp8ActivationKernel() { return {}; }
Sm90Kernel Sm90MxFp4MatmulKernel() { return {}; }
Sm90Kernel Sm90MxFp4DecodeKernel(bool) { return {}; }
Sm90Kernel Sm90MxFp4ActivationKernel() { return {}; }
Sm90Kernel Sm90MxFp4LhsGradientKernel() { return {}; }

}  // namespace jax_ep

int main(int argc, char** argv) {
  using namespace harness;
  using jax_ep::Fp8RhsGradientKernel;
  emulation::Register(Fp8RhsGradientKernel(false).kernel.address,
                      jax_ep::sm90::GroupedMatmulFp8RhsGradientKernel<false>);
  emulation::Register(Fp8RhsGradientKernel(true).kernel.address,
                      jax_ep::sm90::GroupedMatmulFp8RhsGradientKernel<true>);
  emulation::settings.num_sms = 8;
  emulation::settings.resident_blocks = 4;
  emulation::settings.seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const auto check = [](bool accumulates, std::vector<int32_t> sizes, int64_t k, int64_t n) {
    Fp8GradientCase c{Numbers::kExact, n % 16 == 8, accumulates, 0, k, n, std::move(sizes)};
    c.out_is_float32 |= accumulates;
    for (int32_t size : c.sizes) c.m += size;
    c.m += 70;
    c.num_sms = accumulates ? 4 : 8;
    c.tile_counter = accumulates ? -1 : 1;
    double error = 0;
    Fp8GradientRunner runner(c);
    const std::string problem = runner.Run(&error);
    Report(problem.empty(), c.Name() + " " + std::to_string(k) + " x " + std::to_string(n),
           problem);
  };
  for (bool accumulates : {false, true}) {
    check(accumulates, {130, 0, 1, 300}, 200, 264);  // few k-blocks
    check(accumulates, {0, 0}, 136, 128);            // zeros, or accumulators
    check(accumulates, {640, 128, 60}, 330, 520);    // an odd number of tiles
    check(accumulates, {2300}, 72, 392);             // many k-blocks
    check(accumulates, {1400}, 264, 8);
  }
  return failures == 0 ? 0 : 1;
}
