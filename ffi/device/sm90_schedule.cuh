// Which tiles a block computes (sm_90): found by a warp of its own, which leaves them in the ring.
#ifndef JAX_EP_DEVICE_SM90_SCHEDULE_CUH_
#define JAX_EP_DEVICE_SM90_SCHEDULE_CUH_

#include "ffi/device/group_tiles.cuh"
#include "ffi/device/sm90_pipeline.cuh"
#include "ffi/device/tile_claims.cuh"

namespace jax_ep::sm90 {

// Tiles of kTileM rows, in steps of kTileK along the contraction.
template <MatmulKind kKind, int kTileM, int kTileK>
class Tiles {
 public:
  __device__ explicit Tiles(const MatmulProblem& problem)
      : problem_(problem),
        groups_(problem.rows, CeilDivide(problem.num_m, kTileM),
                CeilDivide(problem.num_n, problem.tile_n)) {}

  // By whole warps, with growing indices.
  __device__ Tile Find(int64_t index) {
    GroupTile at;
    if (!groups_.Find(index, &at)) return {};
    Tile tile = {.group = at.group, .m = at.m * kTileM, .n = at.n * problem_.tile_n};
    bool is_zero = false;
    if constexpr (kIsGradient<kKind>) {
      tile.num_m = problem_.num_m - tile.m;
      tile.k = at.first_row;
      tile.num_k = at.end_row - at.first_row;
      is_zero = tile.num_k == 0;
    } else {
      tile.m += at.first_row;
      tile.num_m = at.end_row - tile.m;
      tile.num_k = problem_.num_k;
      is_zero = at.group == problem_.rows.num_groups;
    }
    // One step of what the copies put where there are no operands.
    if (is_zero) {
      tile.group = min(tile.group, problem_.rows.num_groups - 1);
      tile.k = kIsGradient<kKind> ? problem_.rows.num_rows : problem_.num_k;
      tile.num_k = kTileK;
    }
    return tile;
  }

 private:
  const MatmulProblem& problem_;
  GroupTiles<kIsGradient<kKind> ? 0 : kTileM> groups_;
};

// Finding a tile takes about a microsecond: one warp does it for the others, ahead of them.
template <typename Tiles, typename Pipeline>
__device__ void Schedule(const MatmulProblem& problem, const Pipeline& pipeline) {
  const bool is_leader = threadIdx.x % 32 == 0;
  Tiles tiles(problem);
  TileClaims claims(problem.tile_counter);
  Position<Pipeline::kTileSlots> slot;
  Position<1> wanted;
  while (true) {
    const Tile tile = tiles.Find(__shfl_sync(0xffffffffu, claims.index(), 0));
    if (is_leader) {
      // The first round finds the ring empty: it waits for the phase before the first.
      WaitBarrier(pipeline.TileEmpty(slot.index), slot.parity ^ 1);
      *Pipeline::TileSlot(slot.index) = tile;
      Arrive(pipeline.TileFull(slot.index));
    }
    if (tile.num_k == 0) break;
    if (is_leader) {
      WaitBarrier(pipeline.TileWanted(), wanted.parity);
      claims.Next();
    }
    slot.Advance();
    wanted.Advance();
  }
  if (is_leader) claims.Finish();
}

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_SM90_SCHEDULE_CUH_
