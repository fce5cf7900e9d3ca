// Where the operands of a step come from, and how they lie in a stage (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_OPERAND_LOADS_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_OPERAND_LOADS_CUH_

#include "ffi/device/matmul/problem.h"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/prefix_maps.cuh"
#include "ffi/device/matmul/sm90/tensor_map.h"
#include "ffi/device/ptx/mbarrier.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90 {

// A block computes a tile of 128 x 256, each of two groups of four warps 64 x 256 of it.
inline constexpr int kTileM = 128;
inline constexpr int kTileN = 256;
inline constexpr int kTileK = 64;
inline constexpr int kConsumerWarpgroups = 2;
inline constexpr int kWarpgroupM = kTileM / kConsumerWarpgroups;
static_assert(kWarpgroupM == 64, "rows of one instruction");

// A stage: the left operand, then the right one, each in blocks of 64 lines of 64 elements.
inline constexpr int kLine = 64;  // elements of a line of 128 bytes
inline constexpr int kLeftBytes = kTileM * kTileK * 2;
inline constexpr int kLeftHalfBytes = kLeftBytes / kConsumerWarpgroups;  // a consumer's
inline constexpr int kRightBytes = kTileN * kTileK * 2;
inline constexpr int kBlockBytes = kTileK * kLine * 2;   // 64 x 64 elements
inline constexpr int kRightHalfBytes = kRightBytes / 2;  // a box, or two
inline constexpr int kRightHalfN = kTileN / 2;
static_assert(kRightHalfN == 2 * kLine && kRightHalfBytes == 2 * kBlockBytes);

// A step along k of both operands, of rows that are all there from the beginning.
template <MatmulKind kKind>
struct Source {
  const MatmulTensorMaps& maps;
  const int rank;
  const int up_n;          // columns from gate to up, or 0
  const int right_blocks;  // of a box

  __device__ void Await(const Tile& /*tile*/) const {}

  __device__ void Copy(const Tile& tile, int k, uint32_t stage, uint32_t full) const {
    // Without rows for a consumer its half of left is left out.
    const bool has_one = tile.num_m > 0;
    const bool has_both = tile.num_m > kWarpgroupM;
    MbarrierArriveExpectTx(full, kRightBytes + (has_both  ? kLeftBytes
                                                : has_one ? kLeftHalfBytes
                                                          : 0));
    if (tile.shared == Shared::kRight) {
      CopyRight<true>(tile, k, rank, stage, full);
      if (has_one) CopyLeft<false>(tile, k, 0, stage, full);
      if (has_both) CopyLeft<false>(tile, k, 1, stage, full);
    } else {
      if (has_both || rank == 0) CopyLeft<true>(tile, k, rank, stage, full);
      CopyRight<false>(tile, k, 0, stage, full);
      CopyRight<false>(tile, k, 1, stage, full);
    }
  }

 private:
  template <bool kToAll>
  __device__ static void CopyFor(uint32_t to, const CUtensorMap* map, uint32_t full,
                                 const TmaCoordinates& at) {
    if constexpr (kToAll) {
      TmaLoadMulticast(to, map, full, at, (1 << kClusterBlocks) - 1);
    } else {
      TmaLoad(to, map, full, at);
    }
  }

  // A gradient's, of a step.
  __device__ static TmaCoordinates ContractedRows(const Tile& tile, int k, int column,
                                                  int block = 0) {
    return RowsUntil(tile.k + tile.num_k, column, tile.k + k, block);
  }

  // Past the group's end come zeros instead of another group's rows. A gradient would add those to
  // its sums; elsewhere they would not be stored, and need not be read.
  template <bool kToAll>
  __device__ void CopyLeft(const Tile& tile, int k, int half, uint32_t stage, uint32_t full) const {
    const int m = half * kWarpgroupM;
    CopyFor<kToAll>(stage + half * kLeftHalfBytes, &maps.left, full,
                    kIsRhsGradient<kKind> ? ContractedRows(tile, k, tile.m + m)
                                          : RowsUntil(tile.m + tile.num_m, tile.k + k, tile.m + m));
  }

  template <bool kToAll>
  __device__ void CopyRight(const Tile& tile, int k, int half, uint32_t stage,
                            uint32_t full) const {
    const uint32_t to = stage + kLeftBytes + half * kRightHalfBytes;
    // Beside the columns of a gate, half of the tile, are those that it multiplies.
    const bool is_up = kIsActivation<kKind> && up_n > 0 && half > 0;
    const int n = tile.n + (is_up ? up_n : half * kRightHalfN);
    const auto place = [&](int column, int block) -> TmaCoordinates {
      if constexpr (kIsRhsGradient<kKind>) {
        return ContractedRows(tile, k, column, block);
      }
      return {column, tile.k + k, block, tile.group};
    };
    if constexpr (kIsTransposed<kKind>) {
      CopyFor<kToAll>(to, &maps.right, full, {tile.k + k, n, 0, tile.group});
    } else if (right_blocks > 1) {
      CopyFor<kToAll>(to, &maps.right, full, place(0, n / kLine));
    } else {
      CopyFor<kToAll>(to, &maps.right, full, place(n, 0));
      CopyFor<kToAll>(to + kBlockBytes, &maps.right, full, place(n + kLine, 0));
    }
  }
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_OPERAND_LOADS_CUH_
