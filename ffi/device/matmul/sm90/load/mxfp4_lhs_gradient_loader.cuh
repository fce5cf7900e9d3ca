// Loads the k-blocks of bfloat16 rows and of MXFP4 weights that are contracted along their columns,
// by TMA (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_LOAD_MXFP4_LHS_GRADIENT_LOADER_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_LOAD_MXFP4_LHS_GRADIENT_LOADER_CUH_

#include "ffi/device/matmul/sm90/load/operand_loader.cuh"
#include "ffi/device/matmul/sm90/mxfp4_lhs_gradient_shapes.h"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/shapes.h"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/mbarrier.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90 {

struct MxFp4LhsGradientLoader {
  const MatmulTensorMaps& maps;
  const int block_rank;  // in the cluster

  // As SwappedOperandLoader::SelectLoad.
  template <typename Function>
  __device__ __forceinline__ void SelectLoad(const Tile& tile, const Function& run) const {
    if (tile.shared == SharedOperand::kANarrow) {
      run(kLhsGradientNarrowK, [&](int k, uint32_t stage, uint32_t full_barrier) {
        LoadNarrow(tile, k, stage, full_barrier);
      });
    } else if (tile.shared == SharedOperand::kA) {
      run(kTileK, [&](int k, uint32_t stage, uint32_t full_barrier) {
        const int boxes = Announce(tile, full_barrier);
        TmaLoad(stage + kLhsGradientWeightsAt, &maps.b, full_barrier, Weights(tile, k));
        LoadRows<true>(tile, k, block_rank, boxes, stage, full_barrier);
        LoadRows<true>(tile, k, block_rank + kClusterBlocks, boxes, stage, full_barrier);
      });
    } else {
      run(kTileK, [&](int k, uint32_t stage, uint32_t full_barrier) {
        const int boxes = Announce(tile, full_barrier);
        TmaLoad(stage + kLhsGradientWeightsAt, &maps.b, full_barrier, Weights(tile, k));
#pragma unroll
        for (int box = 0; box < kSwappedRows / kSwappedBoxRows; ++box) {
          LoadRows<false>(tile, k, box, boxes, stage, full_barrier);
        }
      });
    }
  }

 private:
  static constexpr int kUnitBytes = kSwappedNarrowBoxRows * kSwizzleBytes;

  // Announces the bytes of an ordinary stage, and returns its boxes of rows.
  __device__ static int Announce(const Tile& tile, uint32_t full_barrier) {
    const int boxes = CeilDivide(tile.num_m, kSwappedBoxRows);
    MbarrierArriveExpectTx(full_barrier, kLhsGradientWeightsBytes + boxes * kSquareBytes);
    return boxes;
  }

  // The k-blocks of a stage: each block of the cluster loads the rows of every other one for both.
  __device__ void LoadNarrow(const Tile& tile, int k, uint32_t stage, uint32_t full_barrier) const {
    const int boxes = CeilDivide(tile.num_m, kSwappedNarrowBoxRows);
    const int k_blocks = min(CeilDivide(tile.num_k - k, kTileK), kLhsGradientNarrowKBlocks);
    MbarrierArriveExpectTx(full_barrier,
                           k_blocks * (kLhsGradientWeightsBytes + boxes * kUnitBytes));
    for (int k_block = 0; k_block < k_blocks; ++k_block) {
      TmaLoadEvictFirst(stage + kLhsGradientWeightsAt + k_block * kLhsGradientWeightsBytes,
                        &maps.b_narrow, full_barrier, Weights(tile, k + k_block * kTileK));
    }
    for (int k_block = block_rank; k_block < k_blocks; k_block += kClusterBlocks) {
      for (int box = 0; box < boxes; ++box) {
        LoadBox<true>(stage + k_block * kSwappedNarrowRowsBytes + box * kUnitBytes, &maps.a_narrow,
                      full_barrier,
                      PrefixCoordinates(tile.m + tile.num_m, tile.k + k + k_block * kTileK,
                                        tile.m + box * kSwappedNarrowBoxRows));
      }
    }
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

  __device__ static TmaCoordinates Weights(const Tile& tile, int k) {
    return {tile.n / kMxFp4PerElement, tile.k + k, 0, tile.group};
  }
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_LOAD_MXFP4_LHS_GRADIENT_LOADER_CUH_
