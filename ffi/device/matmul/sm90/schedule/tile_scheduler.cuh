// The dynamic tile scheduler (sm_90): one warp per cluster, which finds the next pair of tiles for
// both blocks and writes it to their tile slots.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_SCHEDULE_TILE_SCHEDULER_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_SCHEDULE_TILE_SCHEDULER_CUH_

#include "ffi/device/matmul/group_search.cuh"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/shapes.h"
#include "ffi/device/ptx/mbarrier.cuh"

namespace jax_ep::sm90 {

// Both members are zero between launches. Launches that may run at the same time use different
// counters.
struct TileCounter {
  uint32_t num_claimed;   // pairs after the first of each cluster
  uint32_t num_finished;  // clusters
};
__device__ static TileCounter tile_counters[kNumTileCounters];

// Hands out the indices of pairs. A cluster's first pair has the cluster's index; each later one is
// the next that no cluster has claimed.
//
// Neighboring pairs then start at about the same time, however long earlier pairs took. Operands
// that they have in common are read from memory once, and later from the L2 cache. With a static
// schedule and single tiles, groups of 512 rows, give or take 20, took 1.4 times as long. Results
// do not depend on which cluster computes which pair.
//
// Used by one thread of a cluster.
class DynamicTileScheduler {
 public:
  // With a negative counter the schedule is static: cluster c takes every num_clusters-th pair.
  __device__ DynamicTileScheduler(int32_t counter, uint32_t cluster, uint32_t num_clusters)
      : counter_(counter < 0 ? nullptr : &tile_counters[counter]),
        num_clusters_(num_clusters),
        index_(cluster) {}

  __device__ int64_t index() const { return index_; }

  __device__ void Advance() {
    index_ = counter_ == nullptr ? index_ + num_clusters_
                                 : int64_t{num_clusters_} + atomicAdd(&counter_->num_claimed, 1);
  }

  // Called once, after the last pair. The last cluster resets the counter, since no other will use
  // it.
  __device__ void Finish() {
    if (counter_ == nullptr) return;
    __threadfence();
    if (atomicAdd(&counter_->num_finished, 1) != num_clusters_ - 1) return;
    counter_->num_claimed = 0;
    counter_->num_finished = 0;
  }

 private:
  TileCounter* const counter_;
  const uint32_t num_clusters_;
  int64_t index_;
};

// Turns the index of a pair into its tiles.
template <MatmulKind kKind, typename Raster>
class PairSearch {
 public:
  __device__ explicit PairSearch(const MatmulParams& params) : params_(params), groups_(params) {}

  // Called by whole warps, with indices that never decrease. Lane l returns the tile of block
  // l % kClusterBlocks.
  __device__ Tile Find(int64_t index) {
    GroupItem pair;
    if (!groups_.Find(index, &pair)) return {};
    const PairedTile at = groups_.GroupRaster(pair).At(pair.index, threadIdx.x % kClusterBlocks);
    Tile tile = {.group = pair.group,
                 .m = at.m,
                 .n = at.n_tile * params_.out_tile_n,
                 .num_m = at.num_m,
                 .shared = at.shared};
    if (at.shared == SharedOperand::kANarrow && params_.halves_columns &&
        threadIdx.x % kClusterBlocks == 1) {
      tile.n += params_.out_tile_n / 2;
    }
    bool is_zero = false;
    if constexpr (kIsRhsGradient<kKind>) {
      tile.k = pair.first_row;
      tile.num_k = pair.end_row - pair.first_row;
      is_zero = tile.num_k == 0;
    } else {
      tile.m += pair.first_row;
      tile.num_k = params_.shape_k;
      is_zero = pair.group == params_.groups.num_groups;
    }
    // A result of zeros is one k-block of the zeros that TMA loads outside of a tensor: past the
    // end of k or, for kRhsGradient, in a prefix that is longer than the matrix.
    if (is_zero) {
      tile.group = min(tile.group, params_.groups.num_groups - 1);
      tile.k = kIsRhsGradient<kKind> ? params_.groups.num_rows : params_.shape_k;
      tile.num_k = kTileK;
    }
    return tile;
  }

  // See GroupSearch.
  __device__ uint32_t Count() const { return groups_.Count(); }

 private:
  const MatmulParams& params_;
  GroupSearch<kKind, Raster> groups_;
};

// Finds the cluster's first pair, and writes this block's tile to the block's first slot. Called by
// the scheduler warps of both blocks while these meet, which takes about as long.
template <MatmulKind kKind, typename Raster = TilePairs<kTileM>>
__device__ void FindFirstTile(const MatmulParams& params, const Pipeline& pipeline) {
  const Tile tile = PairSearch<kKind, Raster>(params).Find(blockIdx.x / kClusterBlocks);
  if (threadIdx.x % 32 == ClusterRank()) pipeline.StoreTile(0, tile);
  __syncwarp();
}

// The pairs that are left when every cluster has had the same number of them. If each of two
// clusters can have a half of one, their tiles are cut into halves of their rows: all clusters end
// earlier.
class LastWave {
 public:
  // `num_pairs` of 0: there is none. Results are right with any number, if all clusters have the
  // same one.
  __device__ LastWave(uint32_t num_pairs, uint32_t num_clusters)
      : first_(num_pairs - num_pairs % num_clusters),
        halves_(first_ > 0 && 2 * (num_pairs - first_) <= num_clusters) {}

  __device__ bool Has(int64_t index) const { return halves_ && index >= first_; }
  __device__ int64_t Pair(int64_t index) const {
    return Has(index) ? first_ + (index - first_) / 2 : index;
  }

  // Makes the pair's tile that of an index. Returns false for the second index of a pair that stays
  // whole: the caller goes on to the next.
  template <typename Raster>
  __device__ bool Cut(int64_t index, int32_t out_tile_n, Tile* tile) const {
    // Halves of shorter tiles would wait for the columns of b, which both read.
    constexpr int32_t kMinRows = 128;
    if (!Has(index) || tile->num_k == 0) return true;
    const bool is_second = (index - first_) % 2 == 1;
    if constexpr (kHasWideTiles<Raster>) {
      if (tile->shared == SharedOperand::kAWide) {  // the halves of its columns
        tile->shared = SharedOperand::kA;
        if (is_second) tile->n += out_tile_n;
        return true;
      }
    }
    if (tile->shared != SharedOperand::kA || tile->num_m < kMinRows) return !is_second;
    const int32_t middle = CeilDivide(tile->num_m, 2 * kSwappedRowUnit) * kSwappedRowUnit;
    if (is_second) tile->m += middle;
    tile->num_m = is_second ? tile->num_m - middle : middle;
    return true;
  }

 private:
  const uint32_t first_;
  const bool halves_;
};

// Called by the scheduler warps of both blocks of a cluster. Both hand out the first tile, and
// block 0's finds all later pairs. A search takes about a microsecond; a warp of its own runs it
// ahead of the producers and consumers.
//
// If a call has few pairs, clusters that end early are a loss: see LastWave and GroupSearch.
template <MatmulKind kKind, typename Raster = TilePairs<kTileM>>
__device__ void RunScheduler(const MatmulParams& params, const Pipeline& pipeline, int block_rank) {
  const int lane = threadIdx.x % 32;
  PipelineState<kTileSlots> slot;
  bool is_last = pipeline.LoadTile(slot.index).num_k == 0;
  // This lane has written the tile, so its arrival tells of it.
  if (lane == block_rank) MbarrierArrive(pipeline.TileFullBarrier(slot.index));
  if (block_rank != 0) return;
  const uint32_t num_clusters = gridDim.x / kClusterBlocks;
  PairSearch<kKind, Raster> pairs(params);
  constexpr bool kCutsTiles = requires(Raster raster) { raster.IsTall(); };
  const LastWave last_wave(kCutsTiles && params.has_few_pairs ? pairs.Count() : 0, num_clusters);
  DynamicTileScheduler scheduler(params.tile_counter, blockIdx.x / kClusterBlocks, num_clusters);
  PipelineState<1> request;
  slot.Advance();
  while (!is_last) {
    MbarrierWait(pipeline.TileRequestBarrier(), request.parity);
    Tile tile;
    int64_t index;
    do {
      if (lane == 0) scheduler.Advance();
      index = __shfl_sync(0xffffffffu, scheduler.index(), 0);
      tile = pairs.Find(last_wave.Pair(index));
    } while (!last_wave.Cut<Raster>(index, params.out_tile_n, &tile));
    pipeline.SchedulerAcquire(slot);
    if (lane < kClusterBlocks) pipeline.SendTile(slot.index, tile, lane);
    __syncwarp();
    is_last = tile.num_k == 0;
    slot.Advance();
    request.Advance();
  }
  if (lane == 0) scheduler.Finish();
  // The other block may still read its last tiles.
  for (int i = 0; i < kTileSlots; ++i, slot.Advance()) pipeline.SchedulerAcquire(slot);
}

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_SCHEDULE_TILE_SCHEDULER_CUH_
