// Multiplies 32 columns of MXFP4 weights by up to 16 rows with mma.sync (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_PRODUCT_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_PRODUCT_CUH_

#include "ffi/device/matmul/sm90/mxfp4_decode/pipeline.cuh"
#include "ffi/device/ptx/math.cuh"
#include "ffi/device/ptx/mma.cuh"

namespace jax_ep::sm90::decode {

// A warp's sums of a tile. Columns are the rows of an MMA; k may have any order that both operands
// share. A lane of a quad has 16 weights of a k-block that lie together, and pairs nibbles that are
// four apart, which takes fewer instructions than neighbors do.
//
// `kUnits`: of 8 rows each.
template <typename Shape, int kUnits>
class Product {
 public:
  // `first_column`: of the warp. `scales`: where the tile's begin, `k_blocks` of each column.
  // `k_block`: the warp's of each stage.
  __device__ Product(int first_column, uint32_t scales, int k_blocks, int k_block)
      : k_block_(k_block), next_columns_(8 * k_blocks) {
    const int lane = threadIdx.x % 32;
    const int column = first_column + ColumnOf(lane / 4);
    const int line = lane / 4;
    rows_ = line * kSwizzleBytes + ((lane % 4 * 2) ^ line) * 16;
    weights_ = Shape::kWeightsAt + column * kSwizzleBytes + (column % 8 ^ lane % 4 / 2) * 16 +
               lane % 2 * 8;
    scales_ = scales + column * k_blocks + k_block * 2 + lane % 4 / 2;
  }

  // Returns the column, of eight, that a quad has. Its order lets 16 lanes read weights without
  // bank conflicts.
  __device__ static int ColumnOf(int quad) { return quad % 4 * 2 + quad / 4; }

  __device__ __forceinline__ void Multiply(uint32_t stage) {
    const uint32_t weights =
        stage + weights_ + k_block_ / kBoxKBlocks * Shape::kBoxBytes ^ k_block_ % kBoxKBlocks * 32;
    uint32_t bits[2][2];  // scales: [unit of columns][column]
    uint32_t words[2][2][2];
    uint4 vectors[kUnits][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bits[i / 2][i % 2] = LoadSharedByte(scales_ + i * next_columns_);
    }
    scales_ += Shape::kStageBlocks;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      LoadSharedPair(weights + i * 8 * kSwizzleBytes, words[i / 2][i % 2]);
    }
#pragma unroll
    for (int i = 0; i < 2 * kUnits; ++i) {
      const uint32_t at = stage + (k_block_ * kUnits + i / 2) * 8 * kSwizzleBytes + rows_;
      vectors[i / 2][i % 2] = LoadShared(at ^ i % 2 * 16);
    }
    uint32_t rows[kUnits][2][4];
#pragma unroll
    for (int i = 0; i < 2 * kUnits; ++i) PairRows(vectors[i / 2][i % 2], rows[i / 2][i % 2]);
    const uint32_t large = (bits[0][0] | bits[0][1] | bits[1][0] | bits[1][1]) & kMxFp4LargeScale;
    if (__any_sync(0xffffffffu, large != 0)) {
      MultiplyUnits<true>(bits, words, rows);
    } else {
      MultiplyUnits<false>(bits, words, rows);
    }
  }

  // Adds element 4 * unit + 2 * half + i: row 8 * unit + 2 * (lane % 4) + i, in eight columns.
  __device__ void Deposit(uint32_t sums, int first_column) const {
    const int lane = threadIdx.x % 32;
    const uint32_t to =
        sums + lane % 4 * 2 * Shape::kSumsLine + (first_column + ColumnOf(lane / 4)) * 4;
#pragma unroll
    for (int i = 0; i < 2 * kUnits * 4; ++i) {
      const int columns = i / (4 * kUnits);
      const int unit = i / 4 % kUnits;
      StoreShared(to + (unit * 8 + i % 2) * Shape::kSumsLine + (columns * 16 + i / 2 % 2 * 8) * 4,
                  accumulators_[columns][unit][i % 4]);
    }
  }

 private:
  // Pairs elements of a row that are four apart.
  __device__ static void PairRows(const uint4& vector, uint32_t (&pairs)[4]) {
    pairs[0] = __byte_perm(vector.x, vector.z, 0x5410);
    pairs[1] = __byte_perm(vector.x, vector.z, 0x7632);
    pairs[2] = __byte_perm(vector.y, vector.w, 0x5410);
    pairs[3] = __byte_perm(vector.y, vector.w, 0x7632);
  }

  // kMayBeLarge: for scales that take two factors, see MxFp4Exponent.
  template <bool kMayBeLarge>
  __device__ __forceinline__ void MultiplyUnits(const uint32_t (&bits)[2][2],
                                                const uint32_t (&words)[2][2][2],
                                                const uint32_t (&rows)[kUnits][2][4]) {
#pragma unroll
    for (int columns = 0; columns < 2; ++columns) {
      uint32_t weights[2][2][4];  // [word][column][pair]
#pragma unroll
      for (int column = 0; column < 2; ++column) {
        const uint32_t scale = bits[columns][column];
        const uint32_t factor =
            MxFp4Factor(kMayBeLarge ? MxFp4Exponent(scale) : scale + MxFp4Exponent(0));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          uint32_t& pair = weights[i / 4][column][i % 4];
          pair = MultiplyBFloat16Pairs(ExpandMxFp4(words[columns][column][i / 4], i % 4), factor);
          if (kMayBeLarge) pair = MultiplyBFloat16Pairs(pair, MxFp4HighFactor(scale));
        }
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int word = i / 2;
        const int pair = i % 2 * 2;
        const uint32_t a[4] = {weights[word][0][pair], weights[word][1][pair],
                               weights[word][0][pair + 1], weights[word][1][pair + 1]};
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
          Mma<BFloat16>(accumulators_[columns][unit], a, &rows[unit][word][pair]);
        }
      }
    }
  }

  uint32_t rows_;     // where this lane's first vector of a row lies in a stage
  uint32_t weights_;  // its words of the first column, swizzled
  uint32_t scales_;   // this lane's of the first column in the next stage
  int k_block_;
  int next_columns_;                       // bytes to the scales eight columns on
  float accumulators_[2][kUnits][4] = {};  // [unit of 16 columns]
};

}  // namespace jax_ep::sm90::decode

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_PRODUCT_CUH_
