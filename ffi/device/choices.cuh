// Numbers this rank's choices of each expert in (token, choice) order, tile after tile.
#ifndef JAX_EP_DEVICE_CHOICES_CUH_
#define JAX_EP_DEVICE_CHOICES_CUH_

#include "ffi/device/async_copy.cuh"
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
    for (int i = begin_ + threadIdx.x % 32; i < end_; i += 32) {
      // Checked like an index: a peer that runs another call may have stored its counts here.
      const int32_t expert = routes_[i].expert;
      if (expert < 0 || expert >= call_.num_experts) continue;
      routes_[i].position += Counts(threadIdx.x / 32)[expert];
    }
  }

 private:
  static constexpr int kThreads = 32 * kWarps;

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
    for (int base = begin_; base < end_; base += 32) {
      const int i = base + lane;
      const int32_t id = i < end_ ? ids_[i] : -1;
      const bool is_expert = 0 <= id && id < call_.num_experts;
      const int bin = is_expert ? id : id == -1 ? -1 : call_.num_experts;
      const uint32_t same = __match_any_sync(kWholeWarp, bin);
      const uint32_t lower = same & ((1u << lane) - 1);
      const int32_t before = bin >= 0 ? counts[bin] : 0;
      __syncwarp();
      if (bin >= 0 && lower == 0) counts[bin] = before + __popc(same);
      __syncwarp();
      if (i < end_) routes_[i] = {is_expert ? id : -1, before + __popc(lower)};
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
