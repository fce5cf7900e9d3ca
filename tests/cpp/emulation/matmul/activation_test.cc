// Tests activations and their derivatives as kernels compute them, also where squares overflow.
#include "ffi/device/matmul/activation.cuh"

#include "ffi/kernels/matmul/activation_function.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMost = std::numeric_limits<float>::max();

bool IsClose(float got, double expected) {
  return std::abs(got - expected) <= 1e-5 * (1 + std::abs(expected));
}

// x * sigmoid(a) and its derivative in float64.
void CheckNumber(bool is_gelu, float number, const ActivationResult& got) {
  const double x = number;
  const double scale = is_gelu ? 1.5957691216057308 : 1;
  const double cubic = is_gelu ? 0.044715 : 0;
  const double a = scale * (x + cubic * x * x * x);
  const double sigmoid = 1 / (1 + std::exp(-a));
  const double rest = 1 / (1 + std::exp(a));  // 1 - sigmoid
  CHECK(IsClose(got.value, x * sigmoid));
  CHECK(IsClose(got.derivative, sigmoid * (1 + rest * x * scale * (1 + 3 * cubic * x * x))));
}

void TestNumbers(const ActivationFunction& f, bool is_gelu) {
  const auto check = [&](float x) {
    CheckNumber(is_gelu, x, Activate(f, x));
    CheckNumber(is_gelu, x, ActivateFast<true>(f, x));
  };
  for (float x = 1e-3f; x < kInfinity; x *= 1.25f) {
    check(x);
    check(-x);
  }
  for (float x : {0.0f, kMost, -kMost}) check(x);
}

void TestWhatIsNoNumber(const ActivationFunction& f) {
  CHECK(Activate(f, kInfinity).value == kInfinity);
  CHECK(ActivateFast<true>(f, kInfinity).value == kInfinity);
  const float nan = std::nanf("");
  for (const ActivationResult& got : {Activate(f, nan), ActivateFast<true>(f, nan)}) {
    CHECK(std::isnan(got.value));
    CHECK(std::isnan(got.derivative));
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  using namespace jax_ep;
  for (Activation activation :
       {Activation::kSilu, Activation::kSwiglu, Activation::kGelu, Activation::kGeglu}) {
    const ActivationFunction f = MakeActivationFunction(activation);
    TestNumbers(f, activation == Activation::kGelu || activation == Activation::kGeglu);
    TestWhatIsNoNumber(f);
  }
  return testing::Finish();
}
