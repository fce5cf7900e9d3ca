// MXFP4 weights of the sm_90 matmul: their scales, and how two values become bfloat16. For host and
// device, so that unit tests can check it.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MXFP4_PARAMS_H_
#define JAX_EP_DEVICE_MATMUL_SM90_MXFP4_PARAMS_H_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Values along K that share a scale.
inline constexpr int kMxFp4Block = 32;

// b is [groups, n, k], two E2M1 values per byte, the first in the low bits. In the tensor maps four
// of them are one 16-bit element.
struct MxFp4Scales {
  const uint8_t* b;  // E8M0 [groups, n, k_blocks], at a multiple of 4 bytes
  int32_t k_blocks;  // k / kMxFp4Block
};

// Returns the two E2M1 values of a byte as bfloat16, times 2^-126, the first one in the low half.
//
// E2M1 is a sign, two bits of exponent and one of mantissa. Its three bits beside the sign are the
// lowest two of bfloat16's exponent and the highest of its mantissa. 0.5, which is subnormal in
// E2M1, is so in bfloat16, too: all eight magnitudes are off by the same power of two.
JAX_EP_HOST_DEVICE inline uint32_t ExpandMxFp4(uint32_t byte) {
  const uint32_t magnitudes = byte * (1u << 6 | 1u << 18);
  const uint32_t signs = byte * (1u << 12 | 1u << 24);
  return (magnitudes & 0x01c001c0u) | (signs & 0x80008000u);
}

// Returns the same of nibbles i and i + 4 of a word, for i of 0 to 3.
JAX_EP_HOST_DEVICE inline uint32_t ExpandMxFp4(uint32_t word, int i) {
  const uint32_t shifted = i < 2 ? word : word >> 8;
  // Two copies of a nibble: its sign is taken from one, the rest from the other.
  const uint32_t copies = i % 2 == 0 ? (shifted & 0x000f000fu) * (1u << 6 | 1u << 12)
                                     : (shifted & 0x00f000f0u) * (1u << 2 | 1u << 8);
  return copies & 0x81c081c0u;
}

// A scale of 2^(bits - 127) and the 2^126 above are one factor, 2^(bits - 1). Larger ones than
// bfloat16 has are two: this is the exponent of the first in bfloat16, which has bits up to 128,
// and MxFp4HighFactor is the second.
inline constexpr uint32_t kMxFp4LargeScale = 128;
JAX_EP_HOST_DEVICE inline uint32_t MxFp4Exponent(uint32_t bits) {
  return Min(bits, kMxFp4LargeScale) + 126;
}

// Returns two equal bfloat16 of an exponent.
JAX_EP_HOST_DEVICE inline uint32_t MxFp4Factor(uint32_t exponent) {
  return exponent * (1u << 7 | 1u << 23);
}

// 1 up to kMxFp4LargeScale, and NaN for the bits of NaN.
JAX_EP_HOST_DEVICE inline uint32_t MxFp4HighFactor(uint32_t bits) {
  if (bits == 255) return 0x7fc07fc0u;
  return MxFp4Factor(Max(bits, kMxFp4LargeScale) - kMxFp4LargeScale + 127);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MXFP4_PARAMS_H_
