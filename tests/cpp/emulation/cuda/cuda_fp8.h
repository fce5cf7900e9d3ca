// The conversions of cuda_fp8.h that the tests of matmuls use.
#ifndef JAX_EP_TESTS_CPP_EMULATION_CUDA_CUDA_FP8_H_
#define JAX_EP_TESTS_CPP_EMULATION_CUDA_CUDA_FP8_H_

#include "ffi/device/ptx/eight_bit_types.cuh"
#include "tests/cpp/emulation/ptx/wgmma_fp8.cuh"
#include "tests/cpp/gpu/numbers.h"

struct __half_raw {
  unsigned short x;
};

enum __nv_fp8_interpretation_t { __NV_E4M3, __NV_E5M2 };
enum __nv_saturation_t { __NV_SATFINITE };

inline __half_raw __nv_cvt_fp8_to_halfraw(uint8_t bits, __nv_fp8_interpretation_t type) {
  using namespace jax_ep;
  return {harness::ToFloat16(type == __NV_E5M2 ? EmulatedEightBits<Float8E5M2>(bits)
                                               : EmulatedEightBits<Float8E4M3>(bits))};
}

inline uint8_t __nv_cvt_float_to_fp8(float value, __nv_saturation_t,
                                     __nv_fp8_interpretation_t type) {
  const float values[] = {value, 0, 0, 0};
  return type == __NV_E5M2 ? jax_ep::E5M2::Pack(values) : jax_ep::E4M3::Pack(values);
}

#endif  // JAX_EP_TESTS_CPP_EMULATION_CUDA_CUDA_FP8_H_
