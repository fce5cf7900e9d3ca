// Numbers this rank's assignments to each expert in (token, top-k index) order, tile by tile.
//
// It runs before anything can be copied, and mostly once per launch, so its time is dominated by
// instruction fetches. Loops are therefore not unrolled where there is little to overlap.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_ASSIGNMENT_TILE_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_ASSIGNMENT_TILE_CUH_

#include "ffi/device/profile/recorder.cuh"
#include "ffi/device/protocol/abort.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/transfer/dispatch/expert_bins.cuh"
#include "ffi/device/transfer/dispatch/receivers.cuh"
#include "ffi/device/transfer/eager_buffers.cuh"

namespace jax_ep {

// A tile of consecutive assignments, counted by the kWarps warps of a role in one block; each warp
// has a range of it. Bins are the experts, and one for bad ids. Counts are kept in pairs of bins,
// per warp, in the role's shared memory.
template <int kWarps, typename Receivers = AllRanks>
class AssignmentTile {
 public:
  __device__ AssignmentTile(const CallParams& call, const RoleContext& role,
                            const int32_t* topk_ids, int tile, Receivers receivers = {})
      : call_(call),
        role_(role),
        receivers_(receivers),
        ids_(topk_ids),
        tile_(tile),
        num_pairs_(CountPairs(call.num_experts)),
        begin_(tile * call.tile_assignments + role.Warp() * (call.tile_assignments / kWarps)),
        end_(min(begin_ + call.tile_assignments / kWarps, call.num_assignments())),
        counts_(reinterpret_cast<int2*>(role.shared)),
        routes_(call.LocalBuffer<Route>(kRoutes) + FirstRoute()) {}

  // Counts the tile. The last tile sends this rank's totals to all receivers.
  template <typename Eager>
  __device__ void Count(const Eager& eager, uint64_t sequence) {
    const ProfileSpan span(SpanKind::kCountAssignments);
    const bool sends_totals = tile_ == call_.num_tiles - 1 && MayStoreToPeers(call_);
    CountRange();
    role_.Sync();
    ScanWarps();
    role_.Sync();
    if (role_.Thread() == 0) StoreReleaseDevice(&call_.control->tiles_counted[tile_], sequence);
    // Lower tiles have lower tickets, which wait for lower ones only.
#pragma unroll 1
    for (int other = role_.Thread(); other < tile_; other += kThreads) {
      while (LoadAcquireDevice(&call_.control->tiles_counted[other]) < sequence) __nanosleep(20);
    }
    role_.Sync();
    AddLowerTiles(eager, sends_totals);
    role_.Sync();
  }

  // Called after Count. Calls use(assignment, route) for all assignments of the tile, each in the
  // lane that has counted it.
  template <typename Use>
  __device__ void ForEachRoute(Use use) const {
    const int32_t* const first_positions = WarpBins();
    for (int i = begin_ + LaneIndex(); i < end_; i += 32) {
      Route route = routes_[i];
      if (route.expert >= 0) route.position += first_positions[route.expert];
      use(i, route);
    }
  }

  // Called after Count and WaitForEntry. Sends the tile's routes to all receivers: each lane adds
  // its warp's first positions to the routes that it stored itself.
  __device__ void SendRoutes() {
    const int lane = LaneIndex();
    const int rank = call_.control->rank;
    const int32_t* const first_positions = WarpBins();
#pragma unroll 1
    for (int base = begin_; base < end_; base += 32 * kPerLane) {
      Route routes[kPerLane];
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int i = base + 32 * j + lane;
        if (i < end_) routes[j] = routes_[i];
        // Peers can store to this memory, too, so the index is checked like any other.
        const bool is_routed =
            i < end_ && 0 <= routes[j].expert && routes[j].expert < call_.num_experts;
        if (is_routed) routes[j].position += first_positions[routes[j].expert];
      }
#pragma unroll 1
      for (int distance = 1; distance <= receivers_.count(call_); ++distance) {
        const PeerPointer<Route> to =
            PeerBuffer<Route>(call_, receivers_.After(call_, rank, distance), kRoutes) +
            FirstRoute();
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
          const int i = base + 32 * j + lane;
          if (i < end_) StoreToPeer(to + i, routes[j]);
        }
      }
    }
  }

 private:
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kPerLane = 4;  // loads in flight per lane, to hide memory latency

  // Returns the index of this rank's first route among those of all ranks.
  __device__ int64_t FirstRoute() const {
    return int64_t{call_.control->rank} * call_.num_assignments();
  }

  // Returns a warp's counts, by pair.
  __device__ int2* WarpCounts(int warp) const { return counts_ + warp * num_pairs_; }

  // Returns this warp's counts, by bin.
  __device__ int32_t* WarpBins() const {
    return reinterpret_cast<int32_t*>(WarpCounts(role_.Warp()));
  }

  // Returns a tile's counts, by pair, which higher tiles read.
  __device__ int2* TileCounts(int tile) const {
    return call_.LocalBuffer<int2>(kTileCounts) + tile * num_pairs_;
  }

  // Counts the warp's range. Stores each assignment's expert, and its position within the range.
  __device__ void CountRange() {
    const int lane = LaneIndex();
    int32_t* const counts = WarpBins();
#pragma unroll 1
    for (int pair = lane; pair < num_pairs_; pair += 32) {
      WarpCounts(role_.Warp())[pair] = make_int2(0, 0);
    }
    __syncwarp();
#pragma unroll 1
    for (int base = begin_; base < end_; base += 32 * kPerLane) {
      int32_t ids[kPerLane];
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const int i = base + 32 * j + lane;
        ids[j] = i < end_ ? ids_[i] : -1;
      }
#pragma unroll 1
      for (int first = base; first < base + 32 * kPerLane; first += 32) {
        const int i = first + lane;
        const int bin = ExpertBin(call_, ids[0]);
        const int32_t position = CountInOrder(counts, bin);
        if (i < end_) routes_[i] = {bin < call_.num_experts ? bin : -1, position};
        // The ids shift down by one: the loop is not unrolled, and registers cannot be indexed.
#pragma unroll
        for (int j = 1; j < kPerLane; ++j) ids[j - 1] = ids[j];
      }
    }
  }

  // Replaces each warp's counts by its first positions in the tile, and stores the tile's counts.
  __device__ void ScanWarps() {
#pragma unroll 1
    for (int pair = role_.Thread(); pair < num_pairs_; pair += kThreads) {
      int2 sum = {0, 0};
#pragma unroll 1
      for (int warp = 0; warp < kWarps; ++warp) {
        const int2 count = WarpCounts(warp)[pair];
        WarpCounts(warp)[pair] = sum;
        sum = make_int2(sum.x + count.x, sum.y + count.y);
      }
      TileCounts(tile_)[pair] = sum;
    }
  }

  // Turns first positions in the tile into first positions among all assignments of this rank.
  template <typename Eager>
  __device__ void AddLowerTiles(const Eager& eager, bool sends_totals) {
#pragma unroll 1
    for (int pair = role_.Thread(); pair < num_pairs_; pair += kThreads) {
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
        for (int i = 1; i <= receivers_.count(call_); ++i) {
          const int rank = receivers_.After(call_, eager.rank(), i);
          StorePacket(eager.At(rank).counts() + eager.rank() * num_pairs_ + pair,
                      first | uint64_t{second} << 32, eager.tag());
        }
      }
#pragma unroll 1
      for (int warp = 0; warp < kWarps; ++warp) {
        const int2 count = WarpCounts(warp)[pair];
        WarpCounts(warp)[pair] = make_int2(count.x + before.x, count.y + before.y);
      }
    }
  }

  const CallParams& call_;
  const RoleContext& role_;
  [[no_unique_address]] const Receivers receivers_;
  const int32_t* const ids_;
  const int tile_;
  const int num_pairs_;
  const int begin_;  // the warp's range
  const int end_;
  int2* const counts_;  // [kWarps][pairs]: counts, then first positions
  Route* const routes_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_ASSIGNMENT_TILE_CUH_
