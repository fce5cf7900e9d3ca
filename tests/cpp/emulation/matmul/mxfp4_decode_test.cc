// Checks of tests/cpp/gpu/mxfp4/grouped_matmul_mxfp4_test.cu on a CPU: emulator.h runs the
// unchanged kernel that decodes.
//
//   mxfp4_decode_test [SEED [all]]
#include "cuda_runtime_api.h"
#include "ffi/kernels/matmul/portable/kernels.h"
#include "ffi/kernels/matmul/sm90/grouped_matmul_mxfp4_decode.cu"
#include "tests/cpp/emulation/for_each.h"

#define JAX_EP_EMULATION
#include "tests/cpp/gpu/mxfp4/grouped_matmul_mxfp4_test.cu"

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
Sm90Kernel Sm90MxFp4ActivationKernel() { return {}; }
Sm90Kernel Sm90MxFp4LhsGradientKernel() { return {}; }

}  // namespace jax_ep

int RunChecks(int argc, char** argv) {
  using namespace harness;
  using jax_ep::sm90::GroupedMatmulMxFp4DecodeKernel;
  emulation::Register(jax_ep::Sm90MxFp4DecodeKernel(false).kernel.address,
                      GroupedMatmulMxFp4DecodeKernel<jax_ep::sm90::decode::WideShape>);
  emulation::Register(jax_ep::Sm90MxFp4DecodeKernel(true).kernel.address,
                      GroupedMatmulMxFp4DecodeKernel<jax_ep::sm90::decode::NarrowShape>);
  emulation::settings.num_sms = 4;
  emulation::settings.resident_blocks = 2;
  emulation::settings.seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  CheckEveryWeight(255, 1, 64, 7, "scales of NaN");
  CheckPatterns({{3, 64, 8}, {16, 576, 136}}, {5});
  if (argc > 2) {
    CheckEveryWeight(2, 251, 128, 13, "every value, scales up to 2^125");
    CheckEveryWeight(240, 13, 128, 13, "every value, the largest scales");
    // Several stages, whose last has one to seven k-blocks; the first of many warps rotates.
    CheckPatterns({{10, 1216, 136}, {10, 64, 72}}, {1});
    CheckPatterns({{16, 1216, 136}, {70, 192, 136}, {70, 1216, 264}}, {7});
    CheckDeterminism(100, Cut(90, 10, 5));
    CheckDeterminism(16, Cut(15, 4, 5));
  }
  return failures == 0 ? 0 : 1;
}

#ifndef JAX_EP_PROFILE  // then matmul_profile_test.cc runs them
int main(int argc, char** argv) { return RunChecks(argc, argv); }
#endif
