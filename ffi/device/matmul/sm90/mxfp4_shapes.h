// Shared-memory shapes of the sm_90 matmul of MXFP4 weights. Its tiles are those of swapped
// operands.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MXFP4_SHAPES_H_
#define JAX_EP_DEVICE_MATMUL_SM90_MXFP4_SHAPES_H_

#include "ffi/device/matmul/sm90/mxfp4_params.h"
#include "ffi/device/matmul/sm90/shapes.h"

namespace jax_ep::sm90 {

// Weights per 16-bit element of the tensor map.
inline constexpr int kMxFp4PerElement = 4;

// A stage has the rows first, as with 16-bit operands, then 64 columns of weights per consumer
// warpgroup. A line is one column: 32 bytes of a k-block, or in a narrow tile 128 bytes of four
// k-blocks with the 128-byte swizzle.
inline constexpr int kMxFp4WeightsAt = kSwappedRowsBytes;
inline constexpr int kMxFp4LineBytes = kTileK / 2;
inline constexpr int kMxFp4BoxBytes = kWarpgroupM * kMxFp4LineBytes;
inline constexpr int kMxFp4NarrowKBlocks = 4;
inline constexpr int kMxFp4NarrowK = kMxFp4NarrowKBlocks * kTileK;
inline constexpr int kMxFp4NarrowBoxBytes = kMxFp4NarrowKBlocks * kMxFp4BoxBytes;
static_assert(kMxFp4NarrowKBlocks * kMxFp4LineBytes == kSwizzleBytes, "a line is one swizzle wide");
static_assert(kMxFp4NarrowKBlocks * kSwappedNarrowRowsBytes == kMxFp4WeightsAt,
              "rows of narrow tiles take as much of a stage as those of others");
static_assert(kMxFp4WeightsAt + kConsumerWarpgroups * kMxFp4NarrowBoxBytes <= kStageBytes,
              "a stage holds four k-blocks of a narrow tile");

// Narrow tiles of at most so many rows are multiplied by mma.sync.
inline constexpr int kMxFp4FewRows = 32;

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MXFP4_SHAPES_H_
