// tests/cpp/gpu/quantize/quantize_weights_test.cu on a CPU: emulator.h runs the unchanged kernels.
#include "ffi/kernels/quantize/quantize_weights.cu"

#include "cuda_runtime_api.h"

#define JAX_EP_EMULATION
#define main main_of_quantize_weights_test
#include "tests/cpp/gpu/quantize/quantize_weights_test.cu"
#undef main

namespace {

template <typename Type>
void RegisterKernelsOf(jax_ep::ElementType type) {
  using namespace jax_ep;
  emulation::Register(QuantizeWeightsKernelAddress(type, true), QuantizeWeightsKernel<Type, true>);
  emulation::Register(QuantizeWeightsKernelAddress(type, false),
                      QuantizeWeightsKernel<Type, false>);
}

}  // namespace

int main(int argc, char** argv) {
  RegisterKernelsOf<jax_ep::BFloat16>(jax_ep::kBF16);
  RegisterKernelsOf<jax_ep::Float16>(jax_ep::kF16);
  RegisterKernelsOf<jax_ep::Float32>(jax_ep::kF32);
  return main_of_quantize_weights_test(argc, argv);
}
