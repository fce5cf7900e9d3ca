// Shared-memory shapes of the sm_90 matmul that contracts the columns of MXFP4 weights, and the
// order of its results' columns. For host and device, so that unit tests can check it.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MXFP4_LHS_GRADIENT_SHAPES_H_
#define JAX_EP_DEVICE_MATMUL_SM90_MXFP4_LHS_GRADIENT_SHAPES_H_

#include "ffi/device/matmul/sm90/mxfp4_params.h"
#include "ffi/device/matmul/sm90/mxfp4_shapes.h"
#include "ffi/device/matmul/sm90/shapes.h"

namespace jax_ep::sm90 {

// A stage has the rows of a k-block first, or in a narrow tile those of several k-blocks. The
// weights of each k-block follow, and the factors of each.
//
// A line of weights is one k: the 128 columns of a tile in 64 bytes, with the 64-byte swizzle.
inline constexpr int kLhsGradientNarrowKBlocks = 3;
inline constexpr int kLhsGradientNarrowK = kLhsGradientNarrowKBlocks * kTileK;
inline constexpr int kLhsGradientLineBytes = kSwappedColumns / 2;
inline constexpr int kLhsGradientWeightsAt = kSwappedRowsBytes;
inline constexpr int kLhsGradientWeightsBytes = kTileK * kLhsGradientLineBytes;
static_assert(kLhsGradientNarrowKBlocks * kSwappedNarrowRowsBytes <= kLhsGradientWeightsAt);

// Factors are bfloat16 (MxFp4Factor): two neighbors along k per word, and per 32 columns those of
// each lane of a quad together. The high factors follow the low ones.
inline constexpr int kFactorBlocks = kSwappedColumns / kMxFp4Block;
inline constexpr int kFactorBlockBytes = kTileK * 2;
inline constexpr int kHighFactorsAt = kFactorBlocks * kFactorBlockBytes;
inline constexpr int kFactorsBytes = 2 * kHighFactorsAt;
inline constexpr int kFactorsAt =
    kLhsGradientWeightsAt + kLhsGradientNarrowKBlocks * kLhsGradientWeightsBytes;
static_assert(kFactorsAt + kLhsGradientNarrowKBlocks * kFactorsBytes <= kStageBytes,
              "a stage holds the k-blocks of a narrow tile");

// Sets the sign of all factors of a k-block, low and high ones, if its products take both. That
// changes no product of both.
inline constexpr uint32_t kTakesHighFactors = 0x80008000u;

// Returns the byte of a k-block's factors at which k, k + 1 of 32 columns lie: pair k / 2 is that
// of lane pair % 4 in a quad.
JAX_EP_HOST_DEVICE inline int FactorOffset(int block, int pair) {
  return block * kFactorBlockBytes + pair % 4 * (kFactorBlockBytes / 4) + pair / 4 * 4;
}

// Returns the byte of a k-block's weights at which 32 columns of k `lane` lie, those of `warp`: the
// lane passes its address to ldmatrix, and that of k `lane` + 32.
JAX_EP_HOST_DEVICE inline int LhsGradientWeightsOffset(int warp, int lane) {
  return lane * kLhsGradientLineBytes + (warp / 2 ^ lane / 2 % 4) * 16;
}

// ldmatrix gives lane l of a warp the four columns 4 * (l / 4) and following of 32, for two
// neighbors along k. Two warps have the same 32, and each lane takes two of the four: these are
// rows l / 4 and l / 4 + 8 of its MMA. Returns the first, among the four. Lanes of both halves of a
// warp differ in it, so that they store their results to different banks.
JAX_EP_HOST_DEVICE inline int LhsGradientPair(int warp, int lane) {
  return (warp + lane / 16) % 2 * 2;
}

// Returns the first one's place among the columns of a tile.
JAX_EP_HOST_DEVICE inline int LhsGradientColumn(int warp, int lane) {
  return warp / 2 * kMxFp4Block + lane / 4 * 4 + LhsGradientPair(warp, lane);
}
static_assert(kConsumerWarps / 2 * kMxFp4Block == kSwappedColumns);

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MXFP4_LHS_GRADIENT_SHAPES_H_
