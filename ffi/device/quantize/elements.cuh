// Loads and stores of vectors that are not whole or not aligned, element by element.
#ifndef JAX_EP_DEVICE_QUANTIZE_ELEMENTS_CUH_
#define JAX_EP_DEVICE_QUANTIZE_ELEMENTS_CUH_

#include "ffi/device/ptx/vectors.cuh"

namespace jax_ep {

template <typename Type>
__device__ uint32_t LoadElement(const void* x, int64_t index) {
  if constexpr (Type::kPerWord == 2) {
    return static_cast<const uint16_t*>(x)[index];
  } else {
    return static_cast<const uint32_t*>(x)[index];
  }
}

// Loads up to `count` elements of a vector. The others are zeros.
template <typename Type>
__device__ uint4 LoadElements(const void* x, int64_t first, int count) {
  constexpr int kBits = 32 / Type::kPerWord;
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kPerVector<Type>; ++i) {
    if (i >= count) break;
    words[i / Type::kPerWord] |= LoadElement<Type>(x, first + i) << i % Type::kPerWord * kBits;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Stores the first `count` bytes of words.
__device__ inline void StoreBytes(uint8_t* out, const uint32_t* words, int count) {
  for (int i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(words[i / 4] >> i % 4 * 8);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_QUANTIZE_ELEMENTS_CUH_
