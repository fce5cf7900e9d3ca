// tests/cpp/gpu/quantize/quantize_transposed_test.cu on a CPU: emulator.h runs the unchanged
// kernels.
#include "ffi/kernels/quantize/quantize_transposed.cu"

#include "cuda_runtime_api.h"

#define JAX_EP_EMULATION
#define main main_of_quantize_transposed_test
#include "tests/cpp/gpu/quantize/quantize_transposed_test.cu"
#undef main

namespace {

template <typename Type, bool kPerColumn>
void RegisterKernelsOf(jax_ep::ElementType type) {
  using namespace jax_ep;
  emulation::Register(QuantizeTransposedKernelAddress(type, kPerColumn, true),
                      QuantizeTransposedKernel<Type, kPerColumn, true>);
  emulation::Register(QuantizeTransposedKernelAddress(type, kPerColumn, false),
                      QuantizeTransposedKernel<Type, kPerColumn, false>);
}

template <typename Type>
void RegisterKernelsOf(jax_ep::ElementType type) {
  RegisterKernelsOf<Type, false>(type);
  RegisterKernelsOf<Type, true>(type);
}

}  // namespace

int main(int argc, char** argv) {
  RegisterKernelsOf<jax_ep::BFloat16>(jax_ep::kBF16);
  RegisterKernelsOf<jax_ep::Float16>(jax_ep::kF16);
  RegisterKernelsOf<jax_ep::Float32>(jax_ep::kF32);
  return main_of_quantize_transposed_test(argc, argv);
}
