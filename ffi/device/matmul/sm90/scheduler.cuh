// Which tiles a cluster computes (sm_90): found by a warp of its own, which leaves them in the
// rings.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_SCHEDULER_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_SCHEDULER_CUH_

#include "ffi/device/matmul/group_tiles.cuh"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/tile_claims.cuh"
#include "ffi/device/ptx/mbarrier.cuh"

namespace jax_ep::sm90 {

// Pairs of tiles of kTileM rows, in steps of kTileK along the contraction.
template <MatmulKind kKind, int kTileM, int kTileK>
class Pairs {
 public:
  __device__ explicit Pairs(const MatmulProblem& problem) : problem_(problem), groups_(problem) {}

  // By whole warps, with growing indices. Lane l gets the tile of block l % kClusterBlocks.
  __device__ Tile Find(int64_t index) {
    GroupPart pair;
    if (!groups_.Find(index, &pair)) return {};
    const PairedTile at = groups_.LayoutOf(pair).Place(pair.index, threadIdx.x % kClusterBlocks);
    Tile tile = {.group = pair.group,
                 .m = at.m,
                 .n = at.n * problem_.tile_n,
                 .num_m = at.num_m,
                 .shared = at.shared};
    bool is_zero = false;
    if constexpr (kIsRhsGradient<kKind>) {
      tile.k = pair.first_row;
      tile.num_k = pair.end_row - pair.first_row;
      is_zero = tile.num_k == 0;
    } else {
      tile.m += pair.first_row;
      tile.num_k = problem_.num_k;
      is_zero = pair.group == problem_.rows.num_groups;
    }
    // One step of what the copies put where there are no operands: past the contraction's end, or,
    // of a gradient, in a prefix that is longer than the matrix.
    if (is_zero) {
      tile.group = min(tile.group, problem_.rows.num_groups - 1);
      tile.k = kIsRhsGradient<kKind> ? problem_.rows.num_rows : problem_.num_k;
      tile.num_k = kTileK;
    }
    return tile;
  }

 private:
  const MatmulProblem& problem_;
  GroupTiles<kKind, TilePairs<kTileM>> groups_;
};

// By one warp of block 0, for both. Finding a pair takes about a microsecond: it does so for the
// others, ahead of them.
template <typename Pairs, typename Pipeline>
__device__ void Schedule(const MatmulProblem& problem, const Pipeline& pipeline) {
  const int lane = threadIdx.x % 32;
  Pairs pairs(problem);
  TileClaims claims(problem.tile_counter, blockIdx.x / kClusterBlocks, gridDim.x / kClusterBlocks);
  Position<Pipeline::kTileSlots> slot;
  Position<1> wanted;
  while (true) {
    const Tile tile = pairs.Find(__shfl_sync(0xffffffffu, claims.index(), 0));
    // The first round finds the ring empty: it waits for the phase before the first.
    MbarrierWait(pipeline.TileEmpty(slot.index), slot.parity ^ 1);
    if (lane < kClusterBlocks) pipeline.SendTile(slot.index, tile, lane);
    __syncwarp();
    if (tile.num_k == 0) break;
    MbarrierWait(pipeline.TileWanted(), wanted.parity);
    if (lane == 0) claims.Next();
    slot.Advance();
    wanted.Advance();
  }
  if (lane == 0) claims.Finish();
}

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_SCHEDULER_CUH_
