// tests/cpp/gpu/quantize/quantize_transposed_test.cu on a CPU: emulator.h runs the unchanged
// kernels.
#include "ffi/kernels/quantize/quantize_transposed.cu"

#include "cuda_runtime_api.h"

#define JAX_EP_EMULATION
#define main main_of_quantize_transposed_test
#include "tests/cpp/gpu/quantize/quantize_transposed_test.cu"
#undef main

namespace {

template <typename Rows, bool kPerColumn, bool kWithRows>
void RegisterKernelsOf(jax_ep::ElementType type) {
  using namespace jax_ep;
  emulation::Register(QuantizeTransposedKernelAddress(type, kPerColumn, true, kWithRows),
                      QuantizeTransposedKernel<Rows, kPerColumn, true, kWithRows>);
  emulation::Register(QuantizeTransposedKernelAddress(type, kPerColumn, false, kWithRows),
                      QuantizeTransposedKernel<Rows, kPerColumn, false, kWithRows>);
}

template <typename Rows, bool kWithRows>
void RegisterKernelsOf(jax_ep::ElementType type) {
  RegisterKernelsOf<Rows, false, kWithRows>(type);
  RegisterKernelsOf<Rows, true, kWithRows>(type);
}

template <typename Type>
void RegisterKernelsOf(jax_ep::ElementType type) {
  RegisterKernelsOf<jax_ep::transpose::FloatRows<Type>, false>(type);
  RegisterKernelsOf<jax_ep::transpose::FloatRows<Type>, true>(type);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace jax_ep;
  RegisterKernelsOf<BFloat16>(kBF16);
  RegisterKernelsOf<Float16>(kF16);
  RegisterKernelsOf<Float32>(kF32);
  RegisterKernelsOf<EightBitRows, false>(kF8E4M3);
  return main_of_quantize_transposed_test(argc, argv);
}
