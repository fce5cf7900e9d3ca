// Compares the kernel that quantizes gradients of gated activations with float64 and, bit by bit,
// with the kernels that quantize gradients in bfloat16, on the current GPU.
//
//   quantize_activation_gradient_test [MODE]
//
//   check   every check
//   small   small checks, each buffer an allocation of its own: for compute-sanitizer
//   time    times beside the other kernels, and a copy of as many bytes
//   all     check, then time (the default)
#include <string_view>
#include <vector>

#include "tests/cpp/gpu/quantize/activation_gradient_runner.h"

namespace harness {
namespace {

struct Shape {
  int64_t rows, columns;
  std::vector<int32_t> sizes;
};

void Check(const std::vector<Shape>& shapes) {
  const jax_ep::Status status = jax_ep::LoadQuantizeActivationGradientKernels();
  if (!status.ok()) std::printf("FAIL %s\n", status.message.c_str());
  CaseCount count;
  for (const auto& [rows, columns, sizes] : shapes) {
    for (Activation activation : {Activation::kSwiglu, Activation::kGeglu}) {
      for (bool other : {false, true}) {
        const ActivationCase c = {activation, !other, other, rows, columns, sizes};
        count.Add(c.Name(), ActivationRunner(c).Run());
      }
    }
  }
  count.Finish("quantize_activation_gradient");
}

}  // namespace
}  // namespace harness

#ifndef JAX_EP_EMULATION  // a CPU's times say nothing
#include "tests/cpp/gpu/quantize/activation_gradient_timing.h"
#endif

int main(int argc, char** argv) {
  using namespace harness;
  const std::string_view mode = argc > 1 ? argv[1] : "all";
  if (mode == "small") {
    GuardedBuffer::exact = true;
    Check({{300, 256, {130, 0, 128, 1}}, {200, 128, {-3, 90, 500}}, {40, 128, {0, 0}}});
  } else if (mode == "time") {
    Check({{300, 256, {130, 0, 128, 1}}});
  } else {
    Check({{1, 128, {1}},
           {128, 128, {128}},
           {700, 512, {128, 256, 0, 130, 1, 100}},
           {515, 640, {-7, 300, 0, 400, 20}},
           {5, 256, {1, 1, 1, 1, 1, 1, 1, 1}},
           {2000, 2048, {500, 700, 300}}});
  }
#ifndef JAX_EP_EMULATION
  if (mode == "time" || mode == "all") TimeAll();
#endif
  return failures == 0 ? 0 : 1;
}
