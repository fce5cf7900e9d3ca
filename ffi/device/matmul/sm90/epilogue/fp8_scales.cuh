// How the sm_90 FP8 matmul applies scales: to the products of a k-block, or to the sums of a tile.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_FP8_SCALES_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_FP8_SCALES_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/epilogue/staging.cuh"
#include "ffi/device/matmul/sm90/fp8_params.h"

namespace jax_ep::sm90 {

// The columns of a tile are multiplied one half after the other.
inline constexpr int kHalves = 2;
inline constexpr int kHalfAccumulators = kAccumulators / kHalves;
static_assert(kHalfN == kFp8Block, "a half of a tile has one column of blocks of b");

// Factors of the products of one k-block: for each half, of this thread's two rows.
struct KBlockFactors {
  float2 by_row[kHalves];
};

// What they are products of: scales of this thread's two rows, and of the halves.
struct KBlockScales {
  float rows[2];
  float halves[kHalves];

  __device__ KBlockFactors Factors() const {
    return {
        {{rows[0] * halves[0], rows[1] * halves[0]}, {rows[0] * halves[1], rows[1] * halves[1]}}};
  }
};

// The four lanes of a quad have the same rows. Each loads the scales of one of four k-blocks.
inline constexpr int kQuad = 4;

// Scales of 1 x 128 blocks of a, and of 128 x 128 blocks of b.
struct BlockScales {
  static constexpr bool kPerKBlock = true;
  static constexpr bool kContractsRows = false;  // k runs over the rows of a group

  // Loads this lane's part of four k-blocks from `first` on, which may be past the end. Rows past
  // the group's end have scales of 0, and so have tiles of zeros, whose scales would be those of
  // other rows.
  __device__ static KBlockScales Load(const Fp8Scales& scales, const EpilogueCoordinates& at,
                                      int first) {
    KBlockScales result = {};
    const int k_block = first + threadIdx.x % kQuad;
    if (at.group < 0 || k_block >= scales.k_blocks) return result;
    const int row = threadIdx.x % 32 / kQuad;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row + 8 * h < at.num_m) {
        result.rows[h] = __ldg(scales.a + int64_t{at.m + row + 8 * h} * scales.k_blocks + k_block);
      }
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int n_block = at.n / kFp8Block + half * scales.half_stride;
      if (n_block < scales.n_blocks) {
        result.halves[half] = __ldg(
            scales.b + (int64_t{at.group} * scales.n_blocks + n_block) * scales.k_blocks + k_block);
      }
    }
    return result;
  }

  // Returns the factors of one of the quad's k-blocks. Called by all lanes.
  __device__ static KBlockFactors Select(const KBlockFactors& quad, int k_block) {
    const auto from_lane = [&](float2 value) -> float2 {
      return {__shfl_sync(0xffffffff, value.x, k_block % kQuad, kQuad),
              __shfl_sync(0xffffffff, value.y, k_block % kQuad, kQuad)};
    };
    return {{from_lane(quad.by_row[0]), from_lane(quad.by_row[1])}};
  }

  struct HalfFactors {};
  __device__ static HalfFactors LoadHalf(const Fp8Scales&, const MatmulParams&,
                                         const EpilogueCoordinates&) {
    return {};
  }
  __device__ static void Apply(const HalfFactors&, float (&)[kHalfAccumulators]) {}
};

// One scale per row of a and per column of a matrix of b, applied to a tile's sums.
struct RowScales {
  static constexpr bool kPerKBlock = false;
  static constexpr bool kContractsRows = false;

  __device__ static KBlockScales Load(const Fp8Scales&, const EpilogueCoordinates&, int) {
    return {{1, 1}, {1, 1}};
  }
  __device__ static KBlockFactors Select(const KBlockFactors& quad, int) { return quad; }

  // Factors of the sums of a half of the columns: of this thread's two rows, and of two pairs of
  // adjacent columns, 2 * lane and 64 + 2 * lane.
  struct HalfFactors {
    float rows[2];
    float2 columns[2];
  };

  // Rows past the group's end have factors of 0, and so have tiles of zeros, whose factors would be
  // those of other rows.
  __device__ static HalfFactors LoadHalf(const Fp8Scales& scales, const MatmulParams& params,
                                         const EpilogueCoordinates& at) {
    HalfFactors result = {};
    if (at.group < 0) return result;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane / 4 + 8 * h;
      if (row < at.num_m) result.rows[h] = __ldg(scales.a + at.m + row);
    }
    const int n = at.n + 2 * lane;
    const float2* const columns =
        reinterpret_cast<const float2*>(scales.b + (int64_t{at.group} * params.shape_n + n));
    // shape_n is even.
    if (n < params.shape_n) result.columns[0] = __ldg(columns);
    if (n + kHalfN / 2 < params.shape_n) result.columns[1] = __ldg(columns + kHalfN / 4);
    return result;
  }

  // Multiplies the sums of a half of the columns. Called by all lanes.
  __device__ static void Apply(const HalfFactors& factors, float (&sums)[kHalfAccumulators]) {
#pragma unroll
    for (int j = 0; j < kHalfAccumulators / 4; ++j) {
      const float2 own = factors.columns[j / 8];
      const int from = j % 8 * 4 + threadIdx.x % 4;
      const float column[2] = {__shfl_sync(0xffffffff, own.x, from),
                               __shfl_sync(0xffffffff, own.y, from)};
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[4 * j + i] *= factors.rows[i / 2] * column[i % 2];
    }
  }
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_FP8_SCALES_CUH_
