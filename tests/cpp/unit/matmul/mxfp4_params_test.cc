#include "ffi/device/matmul/sm90/mxfp4_params.h"

#include <cmath>
#include <cstring>
#include <initializer_list>

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

constexpr double kMagnitudes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

double FromBFloat16(uint32_t bits) {
  bits <<= 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

double E2M1(uint32_t bits) { return bits & 8 ? -kMagnitudes[bits & 7] : kMagnitudes[bits & 7]; }

void TestValues() {
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const uint32_t pair = ExpandMxFp4(byte);
    CHECK(std::ldexp(FromBFloat16(pair & 0xffff), 126) == E2M1(byte & 15));
    CHECK(std::ldexp(FromBFloat16(pair >> 16), 126) == E2M1(byte >> 4));
    CHECK((pair >> 15 & 1) == (byte >> 3 & 1) && pair >> 31 == byte >> 7);  // zeros have signs, too
  }
}

void TestPairsOfWords() {
  for (int i = 0; i < 4; ++i) {
    for (uint32_t low = 0; low < 16; ++low) {
      for (uint32_t high = 0; high < 16; ++high) {
        for (uint32_t others : {0u, 0xffffffffu, 0x3ac5917eu}) {
          const uint32_t mask = 0x000f000fu << 4 * i;
          const uint32_t word = (others & ~mask) | (low << 4 * i) | (high << 4 * (i + 4));
          CHECK(ExpandMxFp4(word, i) == ExpandMxFp4(low | high << 4));
        }
      }
    }
  }
}

void TestFactors() {
  for (uint32_t bits = 0; bits < 256; ++bits) {
    const uint32_t low = MxFp4Factor(MxFp4Exponent(bits));
    const uint32_t high = MxFp4HighFactor(bits);
    CHECK(low >> 16 == (low & 0xffff) && high >> 16 == (high & 0xffff));
    const double factor = FromBFloat16(low & 0xffff) * FromBFloat16(high & 0xffff);
    if (bits == 255) {
      CHECK(std::isnan(factor));
    } else {
      CHECK(factor == std::ldexp(1.0, static_cast<int>(bits) - 1));  // 2^126 times the scale
      CHECK(bits > kMxFp4LargeScale || high == 0x3f803f80u);
    }
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestValues();
  jax_ep::TestPairsOfWords();
  jax_ep::TestFactors();
  return jax_ep::testing::Finish();
}
