// Loads the k-blocks of both operands by TMA, for matmuls with swapped operands (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_LOAD_SWAPPED_LOADER_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_LOAD_SWAPPED_LOADER_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/load/operand_loader.cuh"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/shapes.h"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/mbarrier.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90 {

template <MatmulKind kKind, typename Raster>
struct SwappedOperandLoader {
  const MatmulTensorMaps& maps;
  const MatmulParams& params;
  const int block_rank;  // in the cluster

  // Calls run(k per stage, load_stage) once: load_stage(k, stage, full_barrier) announces the bytes
  // of the stage at tile.k + k to the full barrier, and loads this block's share of it. Called by
  // one thread.
  template <typename Function>
  __device__ __forceinline__ void SelectLoad(const Tile& tile, const Function& run) const {
    if (tile.shared == SharedOperand::kA) {
      run(kTileK, [&](int k, uint32_t stage, uint32_t full_barrier) {
        const int boxes = CeilDivide(tile.num_m, kSwappedBoxRows);
        Announce(boxes, full_barrier);
        LoadB(tile, k, stage, full_barrier);
        LoadRows<true>(tile, k, block_rank, boxes, stage, full_barrier);
        LoadRows<true>(tile, k, block_rank + kClusterBlocks, boxes, stage, full_barrier);
      });
    } else if (tile.shared == SharedOperand::kANarrow) {
      run(kSwappedNarrowK, [&](int k, uint32_t stage, uint32_t full_barrier) {
        LoadNarrow(tile, k, stage, full_barrier);
      });
    } else if (kHasWideTiles<Raster> && tile.shared == SharedOperand::kBNarrow) {
      run(kSwappedNarrowK, [&](int k, uint32_t stage, uint32_t full_barrier) {
        LoadNarrowHalf(tile, k, stage, full_barrier);
      });
    } else if (kHasWideTiles<Raster> && tile.shared == SharedOperand::kAWide) {
      run(kTileK, [&](int k, uint32_t stage, uint32_t full_barrier) {
        LoadWide(tile, k, stage, full_barrier);
      });
    } else {
      run(kTileK, [&](int k, uint32_t stage, uint32_t full_barrier) {
        const int boxes = CeilDivide(tile.num_m, kSwappedBoxRows);
        Announce(boxes, full_barrier);
        LoadB(tile, k, stage, full_barrier);
#pragma unroll
        for (int box = 0; box < kSwappedRows / kSwappedBoxRows; ++box) {
          LoadRows<false>(tile, k, box, boxes, stage, full_barrier);
        }
      });
    }
  }

 private:
  static constexpr int kUnitBytes = kSwappedNarrowBoxRows * kSwizzleBytes;

  __device__ static void Announce(int boxes, uint32_t full_barrier) {
    MbarrierArriveExpectTx(full_barrier, kSwappedBBytes + boxes * kSquareBytes);
  }

  // Both k-blocks of a stage; each block of the cluster loads the rows of one of them for both.
  __device__ void LoadNarrow(const Tile& tile, int k, uint32_t stage, uint32_t full_barrier) const {
    const bool is_half = params.halves_columns;
    const int boxes = CeilDivide(tile.num_m, kSwappedNarrowBoxRows);
    MbarrierArriveExpectTx(full_barrier, kClusterBlocks * boxes * kUnitBytes +
                                             (is_half ? kSwappedBBytes : 2 * kSwappedBBytes));
    LoadNarrowRows<true>(tile, k, block_rank, boxes, stage, full_barrier);
    const uint32_t to = stage + kClusterBlocks * kSwappedNarrowRowsBytes;
    if (is_half) {
      LoadSquare<true>(tile.n, tile, k, to, full_barrier);
      LoadSquare<true>(tile.n, tile, k + kTileK, to + kSquareBytes, full_barrier);
    } else {
      LoadSquares<true>(tile.n, tile, k, to, full_barrier);
      LoadSquares<true>(tile.n, tile, k + kTileK, to + kSwappedBBytes, full_barrier);
    }
  }

  // Both k-blocks of a stage: this block's own rows, and 64 of the columns for both blocks.
  __device__ void LoadNarrowHalf(const Tile& tile, int k, uint32_t stage,
                                 uint32_t full_barrier) const {
    const int boxes = CeilDivide(tile.num_m, kSwappedNarrowBoxRows);
    MbarrierArriveExpectTx(full_barrier, 2 * (boxes * kUnitBytes + kSwappedBBytes));
    static_assert(kClusterBlocks * kSquareBytes == kSwappedBBytes, "a block loads one square");
    const int n = block_rank == 0 ? tile.n : SecondSquare(tile.n);
    const uint32_t to = stage + 2 * kSwappedNarrowRowsBytes + block_rank * kSquareBytes;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      LoadBox<true>(to + i * kSwappedBBytes, &maps.b_narrow, full_barrier,
                    SquareCoordinates(n, tile, k + i * kTileK));
      LoadNarrowRows<false>(tile, k, i, boxes, stage, full_barrier);
    }
  }

  // The rows of one of a stage's k-blocks.
  template <bool kMulticast>
  __device__ void LoadNarrowRows(const Tile& tile, int k, int k_block, int boxes, uint32_t stage,
                                 uint32_t full_barrier) const {
#pragma unroll
    for (int box = 0; box < SwappedTilePairs::kNarrowRows / kSwappedNarrowBoxRows; ++box) {
      if (box >= boxes) break;
      LoadBox<kMulticast>(stage + k_block * kSwappedNarrowRowsBytes + box * kUnitBytes,
                          &maps.a_narrow, full_barrier,
                          PrefixCoordinates(tile.m + tile.num_m, tile.k + k + k_block * kTileK,
                                            tile.m + box * kSwappedNarrowBoxRows));
    }
  }

  // Each block of the cluster loads 64 of the rows for both.
  __device__ void LoadWide(const Tile& tile, int k, uint32_t stage, uint32_t full_barrier) const {
    constexpr int kBoxes = SwappedWideTilePairs::kWideRows / kSwappedBoxRows;
    static_assert(kBoxes == kClusterBlocks && SwappedTilePairs::kNarrowRows == kSwappedBoxRows,
                  "a wide tile has all boxes");
    MbarrierArriveExpectTx(full_barrier, 2 * kSwappedBBytes + kBoxes * kSquareBytes);
    LoadRows<true>(tile, k, block_rank, kBoxes, stage, full_barrier);
    const uint32_t to = stage + kSwappedWideRowsBytes;
    LoadSquares<true>(tile.n, tile, k, to, full_barrier);
    LoadSquares<true>(tile.n + params.out_tile_n, tile, k, to + kSwappedBBytes, full_barrier);
  }

  // Loads 64 rows, if the tile has such a box. Those past the group's end are zeros.
  template <bool kMulticast>
  __device__ void LoadRows(const Tile& tile, int k, int box, int boxes, uint32_t stage,
                           uint32_t full_barrier) const {
    if (box >= boxes) return;
    LoadBox<kMulticast>(
        stage + box * kSquareBytes, &maps.a, full_barrier,
        PrefixCoordinates(tile.m + tile.num_m, tile.k + k, tile.m + box * kSwappedBoxRows));
  }

  // Loads 128 columns, 64 for each consumer warpgroup: in a gated activation the second one has the
  // up columns of the first one's gate columns.
  __device__ void LoadB(const Tile& tile, int k, uint32_t stage, uint32_t full_barrier) const {
    const uint32_t to = stage + kSwappedRowsBytes;
    if constexpr (kHasTransposedB<kKind>) {
      TmaLoad(to, &maps.b, full_barrier, {tile.k + k, tile.n, 0, tile.group});
    } else if (!kIsActivation<kKind> && params.b_column_blocks > 1) {
      TmaLoad(to, &maps.b, full_barrier, {0, tile.k + k, tile.n / kColumnBlock, tile.group});
    } else {
      LoadSquares<false>(tile.n, tile, k, to, full_barrier);
    }
  }

  template <bool kIsLastRead>
  __device__ void LoadSquares(int n, const Tile& tile, int k, uint32_t to,
                              uint32_t full_barrier) const {
    LoadSquare<kIsLastRead>(n, tile, k, to, full_barrier);
    LoadSquare<kIsLastRead>(SecondSquare(n), tile, k, to + kSquareBytes, full_barrier);
  }

  __device__ int SecondSquare(int n) const {
    const bool is_gated = kIsActivation<kKind> && params.epilogue.activation.is_gated;
    return n + (is_gated ? params.shape_n : kColumnBlock);
  }

  // Loads 64 columns. No other tile reads those of a narrow or wide one.
  template <bool kIsLastRead>
  __device__ void LoadSquare(int n, const Tile& tile, int k, uint32_t to,
                             uint32_t full_barrier) const {
    const TmaCoordinates at = SquareCoordinates(n, tile, k);
    if constexpr (kIsLastRead) {
      TmaLoadEvictFirst(to, &maps.b_narrow, full_barrier, at);
    } else {
      TmaLoad(to, &maps.b, full_barrier, at);
    }
  }

  __device__ static TmaCoordinates SquareCoordinates(int n, const Tile& tile, int k) {
    return kHasTransposedB<kKind> ? TmaCoordinates{tile.k + k, n, 0, tile.group}
                                  : TmaCoordinates{n, tile.k + k, 0, tile.group};
  }
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_LOAD_SWAPPED_LOADER_CUH_
