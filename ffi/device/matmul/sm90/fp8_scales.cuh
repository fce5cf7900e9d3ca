// How the sm_90 FP8 matmul applies scales: to the products of a k-block, or to the sums of a tile.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_FP8_SCALES_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_FP8_SCALES_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/epilogue_staging.cuh"
#include "ffi/device/matmul/sm90/fp8_params.h"

namespace jax_ep::sm90 {

// The columns of a tile are multiplied one half after the other.
inline constexpr int kHalves = 2;
inline constexpr int kHalfAccumulators = kAccumulators / kHalves;
static_assert(kHalfN == kFp8Block, "a half of a tile has one column of blocks of b");

// Factors of the products of one k-block: for this thread's two rows, and for the halves.
struct KBlockScales {
  float rows[2];
  float halves[kHalves];
};

// The four lanes of a quad have the same rows. Each loads the scales of one of four k-blocks.
inline constexpr int kQuad = 4;

// Scales of 1 x 128 blocks of a, and of 128 x 128 blocks of b.
struct BlockScales {
  static constexpr bool kPerKBlock = true;

  // Loads this lane's part of four k-blocks from `first` on, which may be past the end. Rows past
  // the group's end have scales of 0, and so have tiles of zeros, whose scales would be those of
  // other rows.
  __device__ static KBlockScales Load(const Fp8Scales& scales, const EpilogueCoordinates& at,
                                      bool is_zero, int first) {
    KBlockScales result = {};
    const int k_block = first + threadIdx.x % kQuad;
    if (is_zero || k_block >= scales.k_blocks) return result;
    const int row = threadIdx.x % 32 / kQuad;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row + 8 * h < at.num_m) {
        result.rows[h] = __ldg(scales.a + int64_t{at.m + row + 8 * h} * scales.k_blocks + k_block);
      }
    }
    const int n_block = at.n / kFp8Block;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (n_block + half < scales.n_blocks) {
        result.halves[half] = __ldg(
            scales.b + (int64_t{at.group} * scales.n_blocks + n_block + half) * scales.k_blocks +
            k_block);
      }
    }
    return result;
  }

  // Returns the scales of one of the quad's k-blocks. Called by all lanes.
  __device__ static KBlockScales Select(const KBlockScales& quad, int k_block) {
    const auto from_lane = [&](float value) {
      return __shfl_sync(0xffffffff, value, k_block % kQuad, kQuad);
    };
    return {{from_lane(quad.rows[0]), from_lane(quad.rows[1])},
            {from_lane(quad.halves[0]), from_lane(quad.halves[1])}};
  }

  __device__ static void Apply(const Fp8Scales&, const MatmulParams&, const EpilogueCoordinates&,
                               int, float (&)[kHalfAccumulators]) {}
};

// One scale per row of a and per column of a matrix of b, applied to a tile's sums.
struct RowScales {
  static constexpr bool kPerKBlock = false;

  __device__ static KBlockScales Load(const Fp8Scales&, const EpilogueCoordinates&, bool, int) {
    return {{1, 1}, {1, 1}};
  }
  __device__ static KBlockScales Select(const KBlockScales& quad, int) { return quad; }

  // Multiplies the sums of a half of the columns. Rows past the group's end are not stored.
  __device__ static void Apply(const Fp8Scales& scales, const MatmulParams& params,
                               const EpilogueCoordinates& at, int half,
                               float (&sums)[kHalfAccumulators]) {
    const int lane = threadIdx.x % 32;
    float rows[2] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane / 4 + 8 * h;
      if (row < at.num_m) rows[h] = __ldg(scales.a + at.m + row);
    }
    const float* const columns = scales.b + int64_t{at.group} * params.shape_n;
#pragma unroll
    for (int j = 0; j < kHalfAccumulators / 4; ++j) {
      const int n = at.n + half * kHalfN + 8 * j + lane % 4 * 2;
      float2 column = {};  // shape_n is even
      if (n < params.shape_n) column = __ldg(reinterpret_cast<const float2*>(columns + n));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sums[4 * j + 2 * h] *= rows[h] * column.x;
        sums[4 * j + 2 * h + 1] *= rows[h] * column.y;
      }
    }
  }
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_FP8_SCALES_CUH_
