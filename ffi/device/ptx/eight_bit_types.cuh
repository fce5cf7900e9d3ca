// Rounding float32 to eight-bit floats: to nearest even, saturating to the largest value. A NaN
// becomes 0x7f. And back.
#ifndef JAX_EP_DEVICE_PTX_EIGHT_BIT_TYPES_CUH_
#define JAX_EP_DEVICE_PTX_EIGHT_BIT_TYPES_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// One value by integer arithmetic, for GPUs before compute capability 8.9.
template <int kMantissaBits, int kBias, uint32_t kLargest>
__device__ inline uint32_t RoundToEightBits(float value) {
  constexpr int kDropped = 23 - kMantissaBits;
  constexpr uint32_t kRebias = (127 - kBias) << kMantissaBits;
  constexpr uint32_t kSmallestNormal = (128 - kBias) << 23;
  // Adding it leaves a multiple of the smallest subnormal in the lowest bits.
  constexpr uint32_t kSubnormalShift = (127 - kBias + 1 - kMantissaBits + 23) << 23;
  const uint32_t magnitude = __float_as_uint(value) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  const uint32_t sign = __float_as_uint(value) >> 31 << 7;
  if (magnitude < kSmallestNormal) {
    const float sum = __fadd_rn(__uint_as_float(magnitude), __uint_as_float(kSubnormalShift));
    return sign | (__float_as_uint(sum) - kSubnormalShift);
  }
  const uint32_t half = (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1);
  return sign | Min(((magnitude + half) >> kDropped) - kRebias, kLargest);
}

struct E4M3 {
  // Returns the values of four bytes.
  __device__ static void Unpack(uint32_t word, float (&values)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("{\n.reg .b16 low, high, a, b, c, d;\n.reg .b32 halves;\n"
        "mov.b32 {low, high}, %4;\n"
        "cvt.rn.f16x2.e4m3x2 halves, low;\n"
        "mov.b32 {a, b}, halves;\n"
        "cvt.rn.f16x2.e4m3x2 halves, high;\n"
        "mov.b32 {c, d}, halves;\n"
        "cvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\ncvt.f32.f16 %2, c;\ncvt.f32.f16 %3, d;\n}"
        : "=f"(values[0]), "=f"(values[1]), "=f"(values[2]), "=f"(values[3])
        : "r"(word));
#else
    // As the bits of a float32, exponent and mantissa are the value times 2^-120.
    for (int i = 0; i < 4; ++i) {
      const uint32_t bits = word >> 8 * i;
      const float magnitude = __fmul_rn(__uint_as_float((bits & 0x7f) << 20), 0x1p120f);
      const uint32_t nan = (bits & 0x7f) == 0x7f ? 0x7fc00000u : 0;
      values[i] = __uint_as_float(__float_as_uint(magnitude) | nan | (bits & 0x80) << 24);
    }
#endif
  }

  __device__ static uint32_t Pack(const float* values) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t word;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(word)
        : "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]));
    return word;
#else
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) word |= RoundToEightBits<3, 7, 0x7e>(values[i]) << 8 * i;
    return word;
#endif
  }
};

struct E5M2 {
  __device__ static uint32_t Pack(const float* values) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t word;
    asm("{\n.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n}"
        : "=r"(word)
        : "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]));
    return word;
#else
    uint32_t word = 0;
    for (int i = 0; i < 4; ++i) word |= RoundToEightBits<2, 15, 0x7b>(values[i]) << 8 * i;
    return word;
#endif
  }
};

// Returns two E4M3 values, the first in the low byte. For compute capability 8.9 and newer.
__device__ inline uint16_t PackE4M3([[maybe_unused]] float low, [[maybe_unused]] float high) {
  uint16_t pair = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_EIGHT_BIT_TYPES_CUH_
