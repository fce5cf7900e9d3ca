// bfloat16 and float16 by bit arithmetic, apart from the conversions that the kernels use.
#ifndef JAX_EP_TESTS_CPP_GPU_NUMBERS_H_
#define JAX_EP_TESTS_CPP_GPU_NUMBERS_H_

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define HARNESS_FUNCTION __host__ __device__ inline
#else
#define HARNESS_FUNCTION inline
#endif

namespace harness {

HARNESS_FUNCTION uint32_t Bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

HARNESS_FUNCTION float FromBits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

HARNESS_FUNCTION float FromBFloat16(uint16_t bits) { return FromBits(uint32_t{bits} << 16); }

HARNESS_FUNCTION uint16_t ToBFloat16(float value) {
  const uint32_t bits = Bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

HARNESS_FUNCTION float FromFloat16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits} >> 15 << 31;
  const int exponent = bits >> 10 & 31;
  const uint32_t fraction = bits & 1023;
  if (exponent == 31) return FromBits(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return FromBits(sign | static_cast<uint32_t>(exponent + 112) << 23 | fraction << 13);
}

HARNESS_FUNCTION uint16_t ToFloat16(float value) {
  const uint32_t bits = Bits(value);
  const uint16_t sign = bits >> 16 & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00;    // 65520 and more
  if (magnitude < 0x38800000u) {                         // below 2^-14: multiples of 2^-24
    const float scaled = FromBits(magnitude) * 0x1p24f;  // exact, at most 1024
    const float rounded = (scaled + 0x1p23f) - 0x1p23f;  // to nearest even
    return sign | static_cast<uint16_t>(rounded);
  }
  return sign |
         static_cast<uint16_t>((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13);
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_NUMBERS_H_
