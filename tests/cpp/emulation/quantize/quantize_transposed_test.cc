// tests/cpp/gpu/quantize/quantize_transposed_test.cu on a CPU: emulator.h runs the unchanged
// kernels.
#include "ffi/kernels/quantize/quantize_transposed.cu"

#include "cuda_runtime_api.h"

#define JAX_EP_EMULATION
#define main main_of_quantize_transposed_test
#include "tests/cpp/gpu/quantize/quantize_transposed_test.cu"
#undef main

namespace {

template <typename Rows, bool kPerColumn>
void RegisterKernelsOf(jax_ep::ElementType type) {
  using namespace jax_ep;
  emulation::Register(QuantizeTransposedKernelAddress(type, kPerColumn, true),
                      QuantizeTransposedKernel<Rows, kPerColumn, true>);
  emulation::Register(QuantizeTransposedKernelAddress(type, kPerColumn, false),
                      QuantizeTransposedKernel<Rows, kPerColumn, false>);
}

template <typename Rows>
void RegisterKernelsOf(jax_ep::ElementType type) {
  RegisterKernelsOf<Rows, false>(type);
  RegisterKernelsOf<Rows, true>(type);
}

}  // namespace

int main(int argc, char** argv) {
  using namespace jax_ep;
  RegisterKernelsOf<FloatRows<BFloat16>>(kBF16);
  RegisterKernelsOf<FloatRows<Float16>>(kF16);
  RegisterKernelsOf<FloatRows<Float32>>(kF32);
  RegisterKernelsOf<EightBitRows>(kF8E4M3);
  return main_of_quantize_transposed_test(argc, argv);
}
