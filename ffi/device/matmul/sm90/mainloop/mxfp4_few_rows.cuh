// Multiplies MXFP4 weights and at most a few rows with mma.sync (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_FEW_ROWS_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_FEW_ROWS_CUH_

#include "ffi/device/matmul/sm90/mainloop/mxfp4_scales.cuh"
#include "ffi/device/matmul/sm90/mainloop/mxfp4_weights.cuh"
#include "ffi/device/matmul/sm90/mxfp4_shapes.h"
#include "ffi/device/ptx/math.cuh"
#include "ffi/device/ptx/mma.cuh"
#include "ffi/device/ptx/shared_memory.cuh"

namespace jax_ep::sm90 {

// Issuing instructions bounds such tiles. wgmma prescribes which weights a lane has; mma.sync takes
// both operands from registers, so that k can have any order that both share. A lane of a quad has
// 16 weights of a k-block that lie together: it reads no others, and pairs nibbles that are four
// apart, which takes fewer instructions than neighbors do.
//
// `kUnits`: of 8 rows each.
template <int kUnits>
class MxFp4FewRows {
 public:
  __device__ explicit MxFp4FewRows(int warp) : lines_(warp) {
    const int lane = threadIdx.x % 32;
    rows_ = lane / 4 * kSwizzleBytes + ((lane % 4 * 2) ^ lane / 4) * 16;
    weights_ = lane % 4 / 2 * 16;
    selector_ = 0x4440 | lane % 4 / 2;
  }

  // Multiplies the k-blocks of a stage, of which it has up to four.
  __device__ __forceinline__ void MultiplyStage(const MxFp4WarpScales& scales, uint32_t stage,
                                                int k_blocks) {
#pragma unroll
    for (int i = 0; i < 4; ++i) exponents_[i / 2][i % 2] = scales.Exponents(i / 2, i % 2);
    if (k_blocks >= kMxFp4NarrowKBlocks && !scales.HasLarge()) {
      // Without branches one k-block's loads and expansion overlap the MMAs of another.
      Operands operands[2];
      Load(stage, 0, operands[0]);
#pragma unroll
      for (int k_block = 0; k_block < kMxFp4NarrowKBlocks; ++k_block) {
        if (k_block + 1 < kMxFp4NarrowKBlocks) {
          Load(stage, k_block + 1, operands[(k_block + 1) % 2]);
        }
        Multiply<false>(scales, k_block, operands[k_block % 2]);
      }
      return;
    }
#pragma unroll 1
    for (int k_block = 0; k_block < min(k_blocks, kMxFp4NarrowKBlocks); ++k_block) {
      Operands operands;
      Load(stage, k_block, operands);
      Multiply<true>(scales, k_block, operands);
    }
  }

  __device__ void Get(float (&accumulators)[kAccumulators]) const {
#pragma unroll
    for (int i = 0; i < 4 * kUnits; ++i) {
      accumulators[i] = accumulators_[0][i / 4][i % 4];
      if constexpr (kSets > 1) accumulators[i] += accumulators_[1][i / 4][i % 4];
    }
  }

 private:
  // Eight rows have two sets of accumulators, so that fewer MMAs wait for each other.
  static constexpr int kSets = kUnits == 1 ? 2 : 1;

  // A lane's operands of a k-block.
  struct Operands {
    uint32_t words[2][2];  // weights: [column][word]
    uint4 rows[kUnits][2];
  };

  __device__ __forceinline__ void Load(uint32_t stage, int k_block, Operands& operands) const {
    const uint32_t from = (lines_.At(stage, k_block * 2) ^ weights_) + threadIdx.x % 2 * 8;
    LoadSharedPair(from, operands.words[0]);
    LoadSharedPair(from + MxFp4Lines<true>::kSecond, operands.words[1]);
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
      const uint32_t at =
          stage + k_block * kSwappedNarrowRowsBytes + unit * 8 * kSwizzleBytes + rows_;
#pragma unroll
      for (int word = 0; word < 2; ++word) operands.rows[unit][word] = LoadShared(at ^ word * 16);
    }
  }

  template <bool kMayBeLarge>
  __device__ __forceinline__ void Multiply(const MxFp4WarpScales& scales, int k_block,
                                           const Operands& operands) {
    uint32_t rows[kUnits][2][4];
#pragma unroll
    for (int unit = 0; unit < kUnits; ++unit) {
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        const uint4& vector = operands.rows[unit][word];
        rows[unit][word][0] = __byte_perm(vector.x, vector.z, 0x5410);
        rows[unit][word][1] = __byte_perm(vector.x, vector.z, 0x7632);
        rows[unit][word][2] = __byte_perm(vector.y, vector.w, 0x5410);
        rows[unit][word][3] = __byte_perm(vector.y, vector.w, 0x7632);
      }
    }
    uint32_t weights[2][2][4];  // [word][column][pair]
#pragma unroll
    for (int column = 0; column < 2; ++column) {
      const uint32_t factor =
          MxFp4Factor(__byte_perm(k_block < 2 ? exponents_[column][0] : exponents_[column][1], 0,
                                  selector_ + k_block % 2 * 2));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        weights[i / 4][column][i % 4] =
            MultiplyBFloat16Pairs(ExpandMxFp4(operands.words[column][i / 4], i % 4), factor);
      }
    }
    if (kMayBeLarge && scales.HasLarge()) {
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const uint32_t factor =
            scales.HighFactor(column, k_block / 2, k_block % 2 * 2 + threadIdx.x % 4 / 2);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          uint32_t& pair = weights[i / 4][column][i % 4];
          pair = MultiplyBFloat16Pairs(pair, factor);
        }
      }
    }
#pragma unroll
    for (int word = 0; word < 2; ++word) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t a[4] = {weights[word][0][i], weights[word][1][i], weights[word][0][i + 1],
                               weights[word][1][i + 1]};
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
          Mma<BFloat16>(accumulators_[word % kSets][unit], a, &rows[unit][word][i]);
        }
      }
    }
  }

  const MxFp4Lines<true> lines_;
  uint32_t rows_;             // this lane's first vector of a row
  uint32_t weights_;          // its vector of a k-block
  uint32_t selector_;         // its block of a k-block
  uint32_t exponents_[2][2];  // [column][half of the stage]
  float accumulators_[kSets][kUnits][4] = {};
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_FEW_ROWS_CUH_
