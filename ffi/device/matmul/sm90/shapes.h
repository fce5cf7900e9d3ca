// Threads, tiles and shared-memory shapes of the sm_90 matmuls.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_SHAPES_H_
#define JAX_EP_DEVICE_MATMUL_SM90_SHAPES_H_

#include "ffi/device/common/integers.h"
#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/schedule/swapped_wide_tile_pairs.h"

namespace jax_ep::sm90 {

// A block has one warpgroup for the producer and scheduler warps, and two consumer warpgroups.
inline constexpr int kClusterBlocks = 2;
inline constexpr int kWarpgroupThreads = 128;
inline constexpr int kWarpgroupWarps = kWarpgroupThreads / 32;
inline constexpr int kConsumerWarpgroups = 2;
inline constexpr int kConsumerWarps = kConsumerWarpgroups * kWarpgroupWarps;
inline constexpr int kThreads = (1 + kConsumerWarpgroups) * kWarpgroupThreads;

// A block owns the registers that it is launched with. The producer's warpgroup gives most of its
// share to the consumers.
inline constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
inline constexpr int kProducerRegisters = 56;
inline constexpr int kConsumerRegisters = 224;
static_assert((kProducerRegisters + kConsumerWarpgroups * kConsumerRegisters) * kWarpgroupThreads <=
                  kThreads * kLaunchRegisters,
              "setmaxnreg.inc waits forever for registers that the block does not own");

// A block computes a tile of 128 x 256, each consumer warpgroup 64 x 256 of it.
inline constexpr int kTileM = 128;
inline constexpr int kTileN = 256;
inline constexpr int kTileK = 64;
inline constexpr int kWarpgroupM = kTileM / kConsumerWarpgroups;
inline constexpr int kWarpM = kWarpgroupM / kWarpgroupWarps;
inline constexpr int kHalfN = kTileN / 2;
static_assert(kWarpgroupM == 64 && kTileN == 256, "wgmma computes 64 x 256");

// Each thread of a consumer warpgroup has kAccumulators of them.
inline constexpr int kAccumulators = kWarpM * kTileN / 32;

inline constexpr int kMmaK = 16;  // k of one wgmma
static_assert(kTileK % kMmaK == 0, "a k-block consists of whole MMAs");

// A column block is 64 columns of a matrix as it is stored: 128 bytes, the width of the swizzle.
inline constexpr int kColumnBlock = 64;
inline constexpr int kSwizzleBytes = 128;
static_assert(kColumnBlock * 2 == kSwizzleBytes, "elements have 16 bits");
static_assert(kTileK == kColumnBlock, "an operand tile is made of 64 x 64 squares");

// A pipeline stage holds one k-block: a, then b, both as squares of 64 rows of one column block.
inline constexpr int kStages = 4;
inline constexpr int kSquareBytes = kTileK * kSwizzleBytes;
inline constexpr int kABytes = kTileM * kTileK * 2;
inline constexpr int kAHalfBytes = kABytes / kConsumerWarpgroups;  // one consumer warpgroup's rows
inline constexpr int kBBytes = kTileN * kTileK * 2;
inline constexpr int kBHalfBytes = kBBytes / 2;  // kHalfN columns
inline constexpr int kStageBytes = kABytes + kBBytes;
static_assert(kAHalfBytes == kSquareBytes, "a half of a is one box");
static_assert(kHalfN == 2 * kColumnBlock && kBHalfBytes == 2 * kSquareBytes,
              "a half of b is two squares, loaded as one box or as two");
static_assert(kStageBytes % 1024 == 0, "swizzle atoms begin at multiples of 1024 bytes");

// Each consumer warp stages its results for TMA stores in boxes of kWarpM rows of 128 bytes.
inline constexpr int kStagingBoxes = 2;
inline constexpr int kStagingBoxBytes = kWarpM * kSwizzleBytes;
inline constexpr int kWarpStagingBytes = kStagingBoxes * kStagingBoxBytes;

// ---- Swapped operands

// An MMA's rows are columns of b, and its columns the rows of a, except in wide tiles.
//
// A block computes a tile of up to 256 rows x 128 columns, each consumer warpgroup 64 columns of
// it. A stage has the rows first, then the columns of b.
inline constexpr int kSwappedRows = SwappedTilePairs::kMaxRows;
inline constexpr int kSwappedRowUnit = SwappedTilePairs::kRowUnit;
inline constexpr int kSwappedColumns = kTileM;
inline constexpr int kSwappedBoxRows = 64;
inline constexpr int kSwappedRowsBytes = kSwappedRows * kTileK * 2;
inline constexpr int kSwappedBBytes = kSwappedColumns * kTileK * 2;
static_assert(kSwappedRowsBytes + kSwappedBBytes == kStageBytes, "a stage is one k-block");

// A narrow tile has at most 64 rows, and a stage two k-blocks of it: the rows of both, then the
// columns of both. Its pairs may have halves of tiles, 64 columns per block.
inline constexpr int kSwappedNarrowBoxRows = 16;
inline constexpr int kSwappedNarrowK = 2 * kTileK;
inline constexpr int kSwappedNarrowRowsBytes = SwappedTilePairs::kNarrowRows * kTileK * 2;
static_assert(2 * (kSwappedNarrowRowsBytes + kSwappedBBytes) <= kStageBytes,
              "a stage holds two k-blocks of a narrow tile");

// A wide tile has at most 128 rows and 256 columns. A stage has the rows first, then the 128
// columns of its first half, then those of the second.
inline constexpr int kSwappedWideRowsBytes = SwappedWideTilePairs::kWideRows * kTileK * 2;
static_assert(kSwappedWideRowsBytes + 2 * kSwappedBBytes <= kStageBytes,
              "a stage is one k-block of a wide tile");

// The staging buffer holds so many rows of a tile in 16 bits, and of a warp's 16 columns in
// float32.
inline constexpr int kSwappedBufferRows = kConsumerWarps * kWarpM;
static_assert(SwappedWideTilePairs::kWideRows == kSwappedBufferRows,
              "each warp has 16 rows of a wide tile, in both halves of its columns");
inline constexpr int kSwappedFloat32Rows = kWarpStagingBytes / (kWarpM * 4);

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_SHAPES_H_
