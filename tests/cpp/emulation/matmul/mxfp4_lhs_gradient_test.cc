// Checks of tests/cpp/gpu/mxfp4/grouped_matmul_mxfp4_lhs_gradient_test.cu on a CPU: emulator.h runs
// the unchanged kernel for sm_90a.
//
//   mxfp4_lhs_gradient_test [SEED]
#include "cuda_runtime_api.h"
#include "ffi/kernels/matmul/portable/kernels.h"
#include "ffi/kernels/matmul/sm90/grouped_matmul_mxfp4_lhs_gradient.cu"
#include "tests/cpp/emulation/for_each.h"
#include "tests/cpp/gpu/matmul/report.h"
#include "tests/cpp/gpu/mxfp4/mxfp4_runner.h"

namespace jax_ep {

// These are not emulated here.
MatmulKernel Portable16BitMatmulKernel(bool, MatmulKind, bool) { return {}; }
MatmulKernel PortableFloat32MatmulKernel(MatmulKind) { return {}; }
MatmulKernel PortableActivationGradientKernel(ElementType) { return {}; }
Sm90Kernel Sm90RhsGradientKernel(bool) { return {}; }
Sm90Kernel Sm90SwappedMatmulKernel(bool, MatmulKind) { return {}; }
Sm90Kernel Fp8MatmulKernel(Fp8Kind, bool) { return {}; }
Sm90Kernel Fp8ActivationKernel() { return {}; }
Sm90Kernel Fp8RhsGradientKernel(bool) { return {}; }
Sm90Kernel Sm90MxFp4MatmulKernel() { return {}; }
Sm90Kernel Sm90MxFp4DecodeKernel(bool) { return {}; }
Sm90Kernel Sm90MxFp4ActivationKernel() { return {}; }

}  // namespace jax_ep

int RunChecks(int argc, char** argv) {
  using namespace harness;
  emulation::Register(jax_ep::Sm90MxFp4LhsGradientKernel().kernel.address,
                      jax_ep::sm90::GroupedMatmulMxFp4LhsGradientKernel);
  emulation::settings.num_sms = 8;
  emulation::settings.resident_blocks = 4;
  emulation::settings.seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  uint64_t index = 0;
  const auto check = [&](std::vector<int32_t> sizes, int64_t k, int64_t n, int first_scale = 116) {
    for (ElementType out : {kBF16, kF32}) {
      MxFp4Case c{Sum(sizes) + 70, k, n, sizes};
      c.is_lhs_gradient = true;
      c.out = out;
      c.first_scale = first_scale;
      c.zero_tail = index % 2 == 0;
      c.num_sms = out == kF32 ? 4 : 8;
      c.tile_counter = out == kF32 ? -1 : 1;
      c.seed = 10 * index++;
      double error = 0;
      MxFp4Runner runner(c);
      const std::string problem = runner.Run(&error);
      Report(problem.empty(), std::to_string(k) + " -> " + std::to_string(n), problem);
    }
  };
  check({17, 0, 48, 1, 64}, 456, 352);        // narrow tiles
  check({0, 1, 65, 136, 257, 300}, 200, 96);  // every height, and a column without a neighbor
  check({70, 20}, 1096, 160, 124);            // many k-blocks, scales about 2
  check({90, 0}, 8, 32);
  check({0, 0}, 64, 64);  // zeros
  return failures == 0 ? 0 : 1;
}

#ifndef JAX_EP_PROFILE  // then matmul_profile_test.cc runs them
int main(int argc, char** argv) { return RunChecks(argc, argv); }
#endif
