// Largest magnitudes and scales.
#ifndef JAX_EP_DEVICE_QUANTIZE_SCALE_CUH_
#define JAX_EP_DEVICE_QUANTIZE_SCALE_CUH_

#include "ffi/device/ptx/vectors.cuh"
#include "ffi/device/quantize/scale_params.h"

namespace jax_ep {

// Returns the bits of the largest magnitude, as a float32. As integers, NaN is above infinity, and
// that above all numbers. Elements are compared packed: unpacked here, all would be kept for later.
template <typename Type>
__device__ uint32_t AmaxBits(uint4 vector) {
  const uint32_t words[] = {vector.x, vector.y, vector.z, vector.w};
  uint32_t low = 0, high = 0;
#pragma unroll
  for (uint32_t word : words) {
    if constexpr (Type::kPerWord == 2) low = max(low, word & 0x7fffu);
    high = max(high, word & (Type::kPerWord == 2 ? 0x7fff0000u : 0x7fffffffu));
  }
  float largest[Type::kPerWord];
  Type::Unpack(high | low, largest);
  uint32_t amax = 0;
#pragma unroll
  for (float value : largest) amax = max(amax, __float_as_uint(value));
  return amax;
}

template <int kLanes>
__device__ uint32_t AmaxOfLanes(uint32_t amax) {
#pragma unroll
  for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
    amax = max(amax, __shfl_xor_sync(0xffffffffu, amax, lanes));
  }
  return amax;
}

// Every thread of the block calls this once.
template <int kMaxThreads>
__device__ uint32_t AmaxOfBlock(uint32_t amax) {
  __shared__ uint32_t of_warps[kMaxThreads / 32];
  amax = AmaxOfLanes<32>(amax);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = amax;
  __syncthreads();
  for (int warp = 0; warp < static_cast<int>(blockDim.x) / 32; ++warp) {
    amax = max(amax, of_warps[warp]);
  }
  return amax;
}

__device__ inline float ScaleOf(const ScaleParams& params, uint32_t amax) {
  constexpr uint32_t kInfinity = 0x7f800000u;
  if (amax >= kInfinity) return __uint_as_float(0x7fc00000u);  // NaN
  const float scale =
      __fmul_rn(max(__uint_as_float(amax), params.min_amax), params.inverse_largest);
  if (!params.power_of_two_scales) return scale;
  // Carries any bit of the mantissa into the exponent.
  return __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & kInfinity);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_QUANTIZE_SCALE_CUH_
