// tests/cpp/gpu/quantize/quantize_activation_gradient_test.cu on a CPU: emulator.h runs the
// unchanged kernels.
#include "ffi/kernels/quantize/quantize_activation_gradient.cu"

#include "cuda_runtime_api.h"
#include "ffi/kernels/quantize/quantize_transposed.cu"
#include "tests/cpp/emulation/for_each.h"

#define JAX_EP_EMULATION
#define main main_of_quantize_activation_gradient_test
#include "tests/cpp/gpu/quantize/quantize_activation_gradient_test.cu"
#undef main

int main(int argc, char** argv) {
  using namespace jax_ep;
  emulation::Register(ActivationGradientKernelAddress(), QuantizeActivationGradientKernel);
  using Rows = FloatRows<BFloat16>;
  emulation::Register(QuantizeTransposedKernelAddress(kBF16, true, true, false),
                      QuantizeTransposedKernel<Rows, true, true, false>);
  emulation::Register(QuantizeTransposedKernelAddress(kBF16, false, true, true),
                      QuantizeTransposedKernel<Rows, false, true, true>);
  return main_of_quantize_activation_gradient_test(argc, argv);
}
