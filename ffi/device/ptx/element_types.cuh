// Element types: unpacking 32-bit words to float32, and rounding float32 to packed words.
#ifndef JAX_EP_DEVICE_PTX_ELEMENT_TYPES_CUH_
#define JAX_EP_DEVICE_PTX_ELEMENT_TYPES_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

struct BFloat16 {
  static constexpr int kPerWord = 2;
  __device__ static void Unpack(uint32_t word, float* values) {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
  }
  __device__ static uint32_t Pack(const float* values) {
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    return word;
  }
};

struct Float16 {
  static constexpr int kPerWord = 2;
  __device__ static void Unpack(uint32_t word, float* values) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(values[0]), "=f"(values[1])
        : "r"(word));
  }
  __device__ static uint32_t Pack(const float* values) {
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    return word;
  }
};

struct Float32 {
  static constexpr int kPerWord = 1;
  __device__ static void Unpack(uint32_t word, float* values) { values[0] = __uint_as_float(word); }
  __device__ static uint32_t Pack(const float* values) { return __float_as_uint(values[0]); }
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_ELEMENT_TYPES_CUH_
