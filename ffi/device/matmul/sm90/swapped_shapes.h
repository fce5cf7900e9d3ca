// Tiles of the sm_90 matmuls with swapped operands.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_SWAPPED_SHAPES_H_
#define JAX_EP_DEVICE_MATMUL_SM90_SWAPPED_SHAPES_H_

#include "ffi/device/matmul/sm90/shapes.h"
#include "ffi/device/matmul/sm90/swapped_wide_tile_pairs.h"

namespace jax_ep::sm90 {

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

#endif  // JAX_EP_DEVICE_MATMUL_SM90_SWAPPED_SHAPES_H_
