// Loads the k-blocks of both operands by TMA (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_LOAD_OPERAND_LOADER_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_LOAD_OPERAND_LOADER_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/fp8_params.h"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/mbarrier.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90 {

// Called by one thread. Loads a box for this block, or for all blocks of the cluster.
template <bool kMulticast>
__device__ inline void LoadBox(uint32_t to, const CUtensorMap* map, uint32_t full_barrier,
                               const TmaCoordinates& coordinates) {
  if constexpr (kMulticast) {
    TmaLoadMulticast(to, map, full_barrier, coordinates, (1 << kClusterBlocks) - 1);
  } else {
    TmaLoad(to, map, full_barrier, coordinates);
  }
}

// Loads the k-blocks of both operands for the producer warp. `kInRowBlocks`: the operands of an FP8
// weight gradient, see fp8_params.h.
template <MatmulKind kKind, bool kHasUp = false, bool kInRowBlocks = false>
struct OperandLoader {
  const MatmulTensorMaps& maps;
  const int block_rank;       // in the cluster
  const int up_offset;        // columns of b from gate to up, or 0
  const int b_column_blocks;  // in a box of b

  // Calls run(k per stage, load_stage) once: load_stage(k, stage, full_barrier) is LoadKBlock.
  template <typename Function>
  __device__ __forceinline__ void SelectLoad(const Tile& tile, const Function& run) const {
    run(kInRowBlocks ? kFp8Block : kTileK, [&](int k, uint32_t stage, uint32_t full_barrier) {
      LoadKBlock(tile, k, stage, full_barrier);
    });
  }

  // Called by one thread. Announces the bytes of the k-block at tile.k + k to the full barrier, and
  // loads this block's share of it.
  __device__ void LoadKBlock(const Tile& tile, int k, uint32_t stage, uint32_t full_barrier) const {
    // A consumer warpgroup without rows gets no half of a.
    const bool has_first_half = tile.num_m > 0;
    const bool has_both_halves = tile.num_m > kWarpgroupM;
    MbarrierArriveExpectTx(full_barrier, kBBytes + (has_both_halves  ? kABytes
                                                    : has_first_half ? kAHalfBytes
                                                                     : 0));
    if (tile.shared == SharedOperand::kB) {
      LoadB<true>(tile, k, block_rank, stage, full_barrier);
      if (has_first_half) LoadA<false>(tile, k, 0, stage, full_barrier);
      if (has_both_halves) LoadA<false>(tile, k, 1, stage, full_barrier);
    } else {
      if (has_both_halves || block_rank == 0) LoadA<true>(tile, k, block_rank, stage, full_barrier);
      LoadB<false>(tile, k, 0, stage, full_barrier);
      LoadB<false>(tile, k, 1, stage, full_barrier);
    }
  }

 private:
  // kRhsGradient: the group's rows at tile.k + k, which both operands contract.
  __device__ static TmaCoordinates ContractedRows(const Tile& tile, int k, int column,
                                                  int column_block = 0) {
    return PrefixCoordinates(tile.k + tile.num_k, column, tile.k + k, column_block);
  }

  // FP8 weight gradients: a row block, from a row of its [m or n, 128] on.
  __device__ static TmaCoordinates RowBlock(const Tile& tile, int k, int row) {
    return {0, row, 0, (tile.k + k) / kFp8Block};
  }

  // Rows past the group's end are zeros. kRhsGradient would add the next group's rows to its
  // accumulators. Other kinds would not store their results, but can save the reads.
  template <bool kMulticast>
  __device__ void LoadA(const Tile& tile, int k, int half, uint32_t stage,
                        uint32_t full_barrier) const {
    const int m = half * kWarpgroupM;
    if constexpr (kInRowBlocks) {
      LoadBox<kMulticast>(stage + half * kAHalfBytes, &maps.a, full_barrier,
                          RowBlock(tile, k, tile.m + m));
      return;
    }
    LoadBox<kMulticast>(stage + half * kAHalfBytes, &maps.a, full_barrier,
                        kIsRhsGradient<kKind>
                            ? ContractedRows(tile, k, tile.m + m)
                            : PrefixCoordinates(tile.m + tile.num_m, tile.k + k, tile.m + m));
  }

  template <bool kMulticast>
  __device__ void LoadB(const Tile& tile, int k, int half, uint32_t stage,
                        uint32_t full_barrier) const {
    const uint32_t to = stage + kABytes + half * kBHalfBytes;
    // In a gated activation the second half has the up columns of the first half's gate columns.
    const bool is_up = kHasUp && up_offset > 0 && half > 0;
    const int n = tile.n + (is_up ? up_offset : half * kHalfN);
    if constexpr (kInRowBlocks) {
      LoadBox<kMulticast>(to, &maps.b, full_barrier, RowBlock(tile, k, n));
    } else if constexpr (kHasTransposedB<kKind>) {
      LoadBox<kMulticast>(to, &maps.b, full_barrier, {tile.k + k, n, 0, tile.group});
    } else if (b_column_blocks > 1) {
      LoadBox<kMulticast>(to, &maps.b, full_barrier, ContractedRows(tile, k, 0, n / kColumnBlock));
    } else {
      LoadBox<kMulticast>(to, &maps.b, full_barrier, ContractedRows(tile, k, n));
      LoadBox<kMulticast>(to + kSquareBytes, &maps.b, full_barrier,
                          ContractedRows(tile, k, n + kColumnBlock));
    }
  }
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_LOAD_OPERAND_LOADER_CUH_
