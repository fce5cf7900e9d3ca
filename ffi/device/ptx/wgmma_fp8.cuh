// wgmma on 8-bit floats: asynchronous matrix instructions of a warpgroup (sm_90a).
//
// The tensor cores add 8-bit products with about 14 bits. Sums of many products need a second set
// of accumulators, to which the warpgroup's threads add in float32.
#ifndef JAX_EP_DEVICE_PTX_WGMMA_FP8_CUH_
#define JAX_EP_DEVICE_PTX_WGMMA_FP8_CUH_

#include "ffi/device/ptx/wgmma.cuh"
#include "ffi/device/ptx/wgmma_statement.cuh"

namespace jax_ep {

// Element types: E4M3 holds values up to 448, E5M2 up to 57344.
struct Float8E4M3 {};
struct Float8E5M2 {};

// accumulators[64x128] = a[64x32] * b[32x128], plus accumulators if `accumulate`. Both operands are
// K-major lines of 128 elements (128 bytes) with the 128-byte swizzle; the descriptors and the
// order of `accumulators` are those of wgmma.cuh.
template <typename A, typename B>
__device__ void WgmmaFp8(float (&accumulators)[64], uint32_t a, uint32_t b, bool accumulate);

template <>
__device__ inline void WgmmaFp8<Float8E4M3, Float8E4M3>(float (&accumulators)[64], uint32_t a,
                                                        uint32_t b, bool accumulate) {
  JAX_EP_WGMMA_N128("k32.f32.e4m3.e4m3", "");
}
template <>
__device__ inline void WgmmaFp8<Float8E5M2, Float8E4M3>(float (&accumulators)[64], uint32_t a,
                                                        uint32_t b, bool accumulate) {
  JAX_EP_WGMMA_N128("k32.f32.e5m2.e4m3", "");
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_WGMMA_FP8_CUH_
