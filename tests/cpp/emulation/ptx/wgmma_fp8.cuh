// Replaces ffi/device/ptx/wgmma_fp8.cuh, as wgmma.cuh does for 16-bit operands. Products are added
// in float32.
#ifndef JAX_EP_DEVICE_PTX_WGMMA_FP8_CUH_
#define JAX_EP_DEVICE_PTX_WGMMA_FP8_CUH_

#include <cmath>

#include "tests/cpp/emulation/ptx/wgmma.cuh"

namespace jax_ep {

struct Float8E4M3 {
  static constexpr int kMantissaBits = 3, kBias = 7;
  static constexpr uint32_t kFirstNan = 0x7f;
};
struct Float8E5M2 {
  static constexpr int kMantissaBits = 2, kBias = 15;
  static constexpr uint32_t kFirstNan = 0x7d;
};

template <typename T>
float EmulatedEightBits(uint8_t bits) {
  if ((bits & 0x7f) >= T::kFirstNan) return NAN;
  const int exponent = (bits & 0x7f) >> T::kMantissaBits;
  const int fraction = bits & ((1 << T::kMantissaBits) - 1);
  const int significand = fraction | (exponent > 0 ? 1 << T::kMantissaBits : 0);
  const float magnitude = std::ldexp(static_cast<float>(significand),
                                     std::max(exponent, 1) - T::kBias - T::kMantissaBits);
  return bits >> 7 ? -magnitude : magnitude;
}

// Reads 32 elements along k of a row of lines of 128 bytes.
template <typename T>
void ReadEightBits(const uint8_t* shared, uint32_t descriptor, uint32_t row, float (&values)[32]) {
  for (uint32_t k = 0; k < 32; ++k) {
    const uint32_t address = ((descriptor & 0x3fff) << 4) + row * 128 + k;
    values[k] = EmulatedEightBits<T>(shared[address ^ (address >> 7 & 7) << 4]);
  }
}

template <typename A, typename B>
void WgmmaFp8(float (&accumulators)[64], uint32_t a, uint32_t b, bool accumulate) {
  const uint8_t* const shared = emulation::SharedMemory();
  const uint32_t thread = threadIdx.x % 128;
  float* const sums = accumulators;
  EmulatedMmas::OfThread().open.push_back([=] {
    float rows[2][32];
    for (uint32_t h = 0; h < 2; ++h) {
      ReadEightBits<A>(shared, a, thread / 32 * 16 + h * 8 + thread % 32 / 4, rows[h]);
    }
    for (uint32_t j = 0; j < 16; ++j) {
      for (uint32_t i = 0; i < 2; ++i) {
        float column[32];
        ReadEightBits<B>(shared, b, 8 * j + i + thread % 4 * 2, column);
        for (uint32_t h = 0; h < 2; ++h) {
          float sum = 0;
          for (int k = 0; k < 32; ++k) sum += rows[h][k] * column[k];
          float& accumulator = sums[4 * j + 2 * h + i];
          accumulator = (accumulate ? accumulator : 0) + sum;
        }
      }
    }
  });
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_WGMMA_FP8_CUH_
