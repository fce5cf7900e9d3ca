// Replaces ffi/device/ptx/element_types.cuh, with conversions by bit arithmetic.
#ifndef JAX_EP_DEVICE_PTX_ELEMENT_TYPES_CUH_
#define JAX_EP_DEVICE_PTX_ELEMENT_TYPES_CUH_

#include "ffi/device/common/integers.h"
#include "tests/cpp/gpu/numbers.h"

namespace jax_ep {

struct BFloat16 {
  static constexpr int kPerWord = 2;
  __device__ static void Unpack(uint32_t word, float* values) {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
  }
  __device__ static uint32_t Pack(const float* values) {
    return uint32_t{harness::ToBFloat16(values[1])} << 16 | harness::ToBFloat16(values[0]);
  }
};

struct Float16 {
  static constexpr int kPerWord = 2;
  __device__ static void Unpack(uint32_t word, float* values) {
    values[0] = harness::FromFloat16(static_cast<uint16_t>(word));
    values[1] = harness::FromFloat16(static_cast<uint16_t>(word >> 16));
  }
  __device__ static uint32_t Pack(const float* values) {
    return uint32_t{harness::ToFloat16(values[1])} << 16 | harness::ToFloat16(values[0]);
  }
};

struct Float32 {
  static constexpr int kPerWord = 1;
  __device__ static void Unpack(uint32_t word, float* values) { values[0] = __uint_as_float(word); }
  __device__ static uint32_t Pack(const float* values) { return __float_as_uint(values[0]); }
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_ELEMENT_TYPES_CUH_
