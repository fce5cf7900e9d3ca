// Expands MXFP4 weights that are contracted along their columns, from shared memory to the
// registers from which wgmma reads them (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_LHS_GRADIENT_WEIGHTS_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_LHS_GRADIENT_WEIGHTS_CUH_

#include "ffi/device/matmul/sm90/mxfp4_lhs_gradient_shapes.h"
#include "ffi/device/ptx/math.cuh"
#include "ffi/device/ptx/mma.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/ptx/wgmma_registers.cuh"

namespace jax_ep::sm90 {

// Four columns of one k are 16 bits. ldmatrix transposes 8 x 8 of them, so that a word has four
// columns of two neighbors along k, which is what MMAs pair. Of the four a lane expands two.
class MxFp4TransposedWeights {
 public:
  // `warp`: of the consumers.
  __device__ explicit MxFp4TransposedWeights(int warp) {
    const int lane = threadIdx.x % 32;
    weights_ = kLhsGradientWeightsAt + LhsGradientWeightsOffset(warp, lane);
    factors_ = kFactorsAt + FactorOffset(warp / 2, lane % 4);
    shift_ = LhsGradientPair(warp, lane) * 4;
  }

  // Expands those of k-block `k_block` of a stage.
  __device__ void Expand(uint32_t stage, int k_block, uint32_t (&a)[kWgmmaRegisters]) const {
    const uint32_t weights = stage + weights_ + k_block * kLhsGradientWeightsBytes;
    const uint32_t factors = stage + factors_ + k_block * kFactorsBytes;
    bool takes_high_factors = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      constexpr int kHalfBytes = kLhsGradientWeightsBytes / 2;
      uint32_t matrices[4];
      LdMatrix<true>(weights + half * kHalfBytes, matrices);
      const uint4 vector = LoadShared(factors + half * 16);
      const uint32_t factor[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = matrices[i] >> shift_;
        a[8 * half + 2 * i] = MultiplyBFloat16Pairs(ExpandMxFp4(word, 0), factor[i]);
        a[8 * half + 2 * i + 1] = MultiplyBFloat16Pairs(ExpandMxFp4(word, 1), factor[i]);
      }
      takes_high_factors = (vector.x & kTakesHighFactors) != 0;
    }
    if (!takes_high_factors) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 vector = LoadShared(factors + kHighFactorsAt + half * 16);
      const uint32_t factor[] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        a[8 * half + i] = MultiplyBFloat16Pairs(a[8 * half + i], factor[i / 2]);
      }
    }
  }

 private:
  uint32_t weights_;
  uint32_t factors_;
  uint32_t shift_;
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_LHS_GRADIENT_WEIGHTS_CUH_
