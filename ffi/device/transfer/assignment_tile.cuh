// Numbers this rank's choices of each expert in (token, choice) order, tile after tile.
//
// It runs before anything can be copied, and most of it once in a launch: what it takes is fetching
// its instructions. So there are loops where there is little to overlap.
#ifndef JAX_EP_DEVICE_TRANSFER_ASSIGNMENT_TILE_CUH_
#define JAX_EP_DEVICE_TRANSFER_ASSIGNMENT_TILE_CUH_

#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/transfer/counting.cuh"
#include "ffi/device/transfer/eager_buffer.cuh"

namespace jax_ep {

// A tile of consecutive choices, counted by one block of kWarps warps, each of which has a stretch
// of it. Bins are the experts, and one for bad ids; counts are kept in pairs of bins.
template <int kWarps>
class AssignmentTile {
 public:
  __device__ AssignmentTile(const Call& call, const int32_t* topk_ids, int tile)
      : call_(call),
        ids_(topk_ids),
        tile_(tile),
        num_pairs_(CountPairs(call.num_experts)),
        begin_(tile * call.tile_assignments + threadIdx.x / 32 * (call.tile_assignments / kWarps)),
        end_(min(begin_ + call.tile_assignments / kWarps, call.num_assignments())),
        counts_(reinterpret_cast<int2*>(DynamicSharedMemory())),
        routes_(RoutesOf(call, call.control->rank)) {}

  // With counts to all ranks if this is the last tile.
  __device__ void Count(const EagerBuffers& halves, uint64_t sequence, const ThreadGroup& threads) {
    const bool sends_totals = tile_ == call_.num_tiles - 1 && MayStoreToPeers(call_);
    CountStretch();
    threads.Sync();
    AddWarps();
    threads.Sync();
    if (threadIdx.x == 0) StoreReleaseDevice(&call_.control->tiles_counted[tile_], sequence);
    // Lower tickets, which wait for lower ones only.
#pragma unroll 1
    for (int other = threadIdx.x; other < tile_; other += kThreads) {
      while (LoadAcquireDevice(&call_.control->tiles_counted[other]) < sequence) __nanosleep(20);
    }
    threads.Sync();
    AddLowerTiles(halves, sends_totals);
    threads.Sync();
  }

  // The tile's routes to all ranks, after Count and the gate. What the lane itself left there, from
  // where the warp's choices begin.
  __device__ void SendRoutes() {
    const int lane = threadIdx.x % 32;
    const int rank = call_.control->rank;
    const int32_t* const counts = MyCounts();
#pragma unroll 1
    for (int base = begin_; base < end_; base += 32 * kAtOnce) {
      Route routes[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = base + 32 * j + lane;
        if (i < end_) routes[j] = routes_[i];
        // Memory that peers store to, too: checked like every index.
        const bool is_routed =
            i < end_ && 0 <= routes[j].expert && routes[j].expert < call_.num_experts;
        if (is_routed) routes[j].position += counts[routes[j].expert];
      }
#pragma unroll 1
      for (int distance = 1; distance <= call_.num_ranks; ++distance) {
        Route* const to = RoutesOf(call_, call_.RankAfter(rank, distance));
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int i = base + 32 * j + lane;
          if (i < end_) to[i] = routes[j];
        }
      }
    }
  }

 private:
  static constexpr int kThreads = 32 * kWarps;
  // Choices of a lane that are read before the first is looked at: memory is far.
  static constexpr int kAtOnce = 4;

  // This rank's, at a rank.
  __device__ static Route* RoutesOf(const Call& call, int rank) {
    return call.Of<Route>(rank, kRoutes) + int64_t{call.control->rank} * call.num_assignments();
  }

  __device__ int2* Counts(int warp) const { return counts_ + warp * num_pairs_; }

  // The warp's, of single bins.
  __device__ int32_t* MyCounts() const {
    return reinterpret_cast<int32_t*>(Counts(threadIdx.x / 32));
  }

  // The tile's counts, for higher tiles.
  __device__ int2* TileCounts(int tile) const {
    return call_.Of<int2>(call_.control->rank, kTileCounts) + tile * num_pairs_;
  }

  // Leaves each choice's position among those of its expert in the warp's stretch, and the counts.
  __device__ void CountStretch() {
    const int lane = threadIdx.x % 32;
    int32_t* const counts = MyCounts();
#pragma unroll 1
    for (int pair = lane; pair < num_pairs_; pair += 32) {
      Counts(threadIdx.x / 32)[pair] = make_int2(0, 0);
    }
    __syncwarp();
#pragma unroll 1
    for (int base = begin_; base < end_; base += 32 * kAtOnce) {
      int32_t ids[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = base + 32 * j + lane;
        ids[j] = i < end_ ? ids_[i] : -1;
      }
#pragma unroll 1
      for (int first = base; first < base + 32 * kAtOnce; first += 32) {
        const int i = first + lane;
        const int bin = BinOf(call_, ids[0]);
        const int32_t position = CountInOrder(counts, bin);
        if (i < end_) routes_[i] = {bin < call_.num_experts ? bin : -1, position};
        // One after another in a loop that is not unrolled: registers have no index.
#pragma unroll
        for (int j = 1; j < kAtOnce; ++j) ids[j - 1] = ids[j];
      }
    }
  }

  // Each warp's counts become where its choices begin in the tile.
  __device__ void AddWarps() {
#pragma unroll 1
    for (int pair = threadIdx.x; pair < num_pairs_; pair += kThreads) {
      int2 sum = {0, 0};
#pragma unroll 1
      for (int warp = 0; warp < kWarps; ++warp) {
        const int2 count = Counts(warp)[pair];
        Counts(warp)[pair] = sum;
        sum = make_int2(sum.x + count.x, sum.y + count.y);
      }
      TileCounts(tile_)[pair] = sum;
    }
  }

  // And then where they begin among all of this rank.
  __device__ void AddLowerTiles(const EagerBuffers& halves, bool sends_totals) {
#pragma unroll 1
    for (int pair = threadIdx.x; pair < num_pairs_; pair += kThreads) {
      int2 before = {0, 0};
#pragma unroll 4
      for (int tile = 0; tile < tile_; ++tile) {
        const int2 count = LoadGlobalNoAllocate(&TileCounts(tile)[pair]);
        before = make_int2(before.x + count.x, before.y + count.y);
      }
      if (sends_totals) {
        const int2 count = TileCounts(tile_)[pair];
        const auto first = static_cast<uint32_t>(before.x + count.x);
        const auto second = static_cast<uint32_t>(before.y + count.y);
#pragma unroll 1
        for (int i = 1; i <= call_.num_ranks; ++i) {
          const int rank = call_.RankAfter(halves.rank(), i);
          // SIGNAL_SEGMENT
          StoreRelaxedSystem(&halves.Of(rank).counts()[halves.rank() * num_pairs_ + pair],
                             first | uint64_t{second} << 32, halves.tag());
        }
      }
#pragma unroll 1
      for (int warp = 0; warp < kWarps; ++warp) {
        const int2 count = Counts(warp)[pair];
        Counts(warp)[pair] = make_int2(count.x + before.x, count.y + before.y);
      }
    }
  }

  const Call& call_;
  const int32_t* const ids_;
  const int tile_;
  const int num_pairs_;
  const int begin_;  // of the warp's stretch
  const int end_;
  int2* const counts_;  // [kWarps][pairs]
  Route* const routes_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_ASSIGNMENT_TILE_CUH_
