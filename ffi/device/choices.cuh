// Numbers this rank's choices of each expert in (token, choice) order, tile after tile.
#ifndef JAX_EP_DEVICE_CHOICES_CUH_
#define JAX_EP_DEVICE_CHOICES_CUH_

#include "ffi/device/async_copy.cuh"
#include "ffi/device/counting.cuh"
#include "ffi/device/rows.cuh"
#include "ffi/device/tickets.cuh"

namespace jax_ep {

// A tile of consecutive choices, counted by one block of kWarps warps, each of which has a stretch
// of it. Bins are the experts, and one for bad ids.
template <int kWarps>
class ChoiceTile {
 public:
  __device__ ChoiceTile(const Call& call, const int32_t* topk_ids, int tile)
      : call_(call),
        ids_(topk_ids),
        tile_(tile),
        num_bins_(call.num_experts + 1),
        begin_(tile * call.tile_choices + threadIdx.x / 32 * (call.tile_choices / kWarps)),
        end_(min(begin_ + call.tile_choices / kWarps, call.num_choices())),
        counts_(reinterpret_cast<int32_t*>(DynamicSharedMemory())),
        routes_(call.Of<Route>(call.control->rank, kRoutes)) {}

  // Everything, with counts to all ranks if this is the last tile.
  __device__ void Publish(uint64_t epoch) {
    CountStretch();
    __syncthreads();
    AddWarps();
    __syncthreads();
    if (threadIdx.x == 0) StoreReleaseDevice(&call_.control->tiles_counted[tile_], epoch);
    // Lower tickets, which wait for lower ones only.
    for (int other = threadIdx.x; other < tile_; other += kThreads) {
      while (LoadAcquireDevice(&call_.control->tiles_counted[other]) < epoch) __nanosleep(20);
    }
    __syncthreads();
    AddLowerTiles();
    __syncthreads();
    AddToPositions();
  }

 private:
  static constexpr int kThreads = 32 * kWarps;
  // Choices of a lane that are read before the first is looked at: memory is far.
  static constexpr int kAtOnce = 4;

  __device__ int32_t* Counts(int warp) const { return counts_ + warp * num_bins_; }

  // The tile's counts, for higher tiles.
  __device__ int32_t* TileCounts(int tile) const {
    return call_.Of<int32_t>(call_.control->rank, kTileCounts) + tile * num_bins_;
  }

  // Leaves each choice's position among those of its expert in the warp's stretch, and the counts.
  __device__ void CountStretch() {
    const int lane = threadIdx.x % 32;
    int32_t* const counts = Counts(threadIdx.x / 32);
    for (int bin = lane; bin < num_bins_; bin += 32) counts[bin] = 0;
    __syncwarp();
    for (int base = begin_ + lane; base - lane < end_; base += 32 * kAtOnce) {
      int32_t ids[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        ids[j] = base + 32 * j < end_ ? ids_[base + 32 * j] : -1;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = base + 32 * j;
        const int bin = BinOf(call_, ids[j]);
        const int32_t position = CountInOrder(counts, bin);
        if (i < end_) routes_[i] = {bin < call_.num_experts ? bin : -1, position};
      }
    }
  }

  // What the lane itself left there, from where the warp's choices begin.
  __device__ void AddToPositions() {
    const int32_t* const counts = Counts(threadIdx.x / 32);
    for (int base = begin_ + threadIdx.x % 32; base < end_; base += 32 * kAtOnce) {
      Route routes[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (base + 32 * j < end_) routes[j] = routes_[base + 32 * j];
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (base + 32 * j >= end_) continue;
        // Checked like an index: a peer that runs another call may have stored its counts here.
        const int32_t expert = routes[j].expert;
        if (expert < 0 || expert >= call_.num_experts) continue;
        routes_[base + 32 * j].position = routes[j].position + counts[expert];
      }
    }
  }

  // Each warp's counts become where its choices begin in the tile.
  __device__ void AddWarps() {
    for (int bin = threadIdx.x; bin < num_bins_; bin += kThreads) {
      int32_t sum = 0;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) {
        const int32_t count = Counts(warp)[bin];
        Counts(warp)[bin] = sum;
        sum += count;
      }
      TileCounts(tile_)[bin] = sum;
    }
  }

  // And then where they begin among all of this rank.
  __device__ void AddLowerTiles() {
    const bool is_last = tile_ == call_.num_tiles - 1;
    for (int bin = threadIdx.x; bin < num_bins_; bin += kThreads) {
      int32_t before = 0;
#pragma unroll 8
      for (int tile = 0; tile < tile_; ++tile) before += LoadShared4(&TileCounts(tile)[bin]);
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) Counts(warp)[bin] += before;
      if (!is_last) continue;
      const int32_t total = before + TileCounts(tile_)[bin];
      for (int rank = 0; rank < call_.num_ranks; ++rank) {
        call_.Of<int32_t>(rank, kAllCounts)[call_.control->rank * num_bins_ + bin] = total;
      }
    }
  }

  const Call& call_;
  const int32_t* const ids_;
  const int tile_;
  const int num_bins_;
  const int begin_;  // of the warp's stretch
  const int end_;
  int32_t* const counts_;  // [kWarps][bins]
  Route* const routes_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_CHOICES_CUH_
