// The 16-bit grouped matmul kernels for sm_90a, compiled for the emulator.
#include "tests/cpp/emulation/matmul/register_matmuls.h"

#include "cuda_runtime_api.h"
#include "ffi/kernels/matmul/portable/kernels.h"
#include "ffi/kernels/matmul/sm90/grouped_matmul_rhs_gradient.cu"
#include "ffi/kernels/matmul/sm90/grouped_matmul_swapped.cu"

namespace jax_ep {

// These are not emulated.
MatmulKernel Portable16BitMatmulKernel(bool, MatmulKind, bool) { return {}; }
MatmulKernel PortableFloat32MatmulKernel(MatmulKind) { return {}; }
MatmulKernel PortableActivationGradientKernel(ElementType) { return {}; }
Sm90Kernel Fp8MatmulKernel(Fp8Kind, bool) { return {}; }
Sm90Kernel Fp8ActivationKernel() { return {}; }
Sm90Kernel Sm90MxFp4MatmulKernel() { return {}; }
Sm90Kernel Sm90MxFp4DecodeKernel(bool) { return {}; }
Sm90Kernel Sm90MxFp4ActivationKernel() { return {}; }
Sm90Kernel Sm90MxFp4LhsGradientKernel() { return {}; }
Sm90Kernel Fp8RhsGradientKernel(bool) { return {}; }

namespace {

template <typename T, MatmulKind kKind>
void RegisterSwapped() {
  const Sm90Kernel kernel = Sm90SwappedMatmulKernel(std::is_same_v<T, BFloat16>, kKind);
  emulation::Register(kernel.kernel.address,
                      sm90::GroupedMatmulSwappedKernel<T, kKind, SwappedTilePairs>);
  if (kernel.wide_address == nullptr) return;
  emulation::Register(kernel.wide_address,
                      sm90::GroupedMatmulSwappedKernel<T, kKind, SwappedWideTilePairs>);
}

template <typename T>
void RegisterKernelsOf() {
  RegisterSwapped<T, MatmulKind::kForward>();
  RegisterSwapped<T, MatmulKind::kForwardTransposed>();
  RegisterSwapped<T, MatmulKind::kActivation>();
  RegisterSwapped<T, MatmulKind::kActivationGradient>();
  emulation::Register(Sm90RhsGradientKernel(std::is_same_v<T, BFloat16>).kernel.address,
                      sm90::GroupedMatmulRhsGradientKernel<T>);
}

}  // namespace
}  // namespace jax_ep

void RegisterMatmuls() {
  jax_ep::RegisterKernelsOf<jax_ep::BFloat16>();
  jax_ep::RegisterKernelsOf<jax_ep::Float16>();
}
