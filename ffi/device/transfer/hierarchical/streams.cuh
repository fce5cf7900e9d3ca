// Streams of work items. The items of one stream follow each other, such as the chunks of one rail,
// and an item is taken only when it can run without a wait: its data have arrived, and the slots
// that it fills are free. So a full destination, or a late source, holds up nobody but itself, and
// any number of blocks makes progress, whatever they run.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_STREAMS_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_STREAMS_CUH_

#include "ffi/device/protocol/deadline.cuh"
#include "ffi/device/protocol/role_context.cuh"

namespace jax_ep {

struct StreamItem {
  int32_t stream;  // -1: there are no more
  int32_t index;   // in the stream
  Outcome outcome;
};

// Called by a role. Takes the next item that is ready, or waits for one. The first warp polls the
// streams; stream i is lane i % 32's. `next` has the index of the next item of each stream.
//
// `Streams` has count(), the number of streams; NumItems(stream); IsReady(stream, item), an acquire
// of all that the item needs; Peer(stream, item), for which rank a wait for it waits; and
// HasEntered(), whether all ranks have entered the call, which the deadline depends on.
template <typename Streams>
__device__ inline StreamItem NextItem(const CallParams& call, const RoleContext& role,
                                      const Streams& streams, uint32_t* next, uint64_t sequence,
                                      StreamItem* scratch) {
  role.Sync();  // the previous item has been read
  if (role.Warp() == 0) {
    Deadline entry(call, WaitPoint::kEntry, sequence);
    Deadline progress(call, WaitPoint::kChunk, sequence);
    const int count = streams.count();
    uint32_t seen = 0;
    StreamItem item = {-1, 0, Outcome::kArrived};
    InjectDelay(call, sequence, 1);
    while (true) {
      uint32_t total = 0, missing = kMaxRanks;
      int ready = -1;
      uint32_t index = 0;
      bool is_left = false;
#pragma unroll 1
      for (int stream = LaneIndex(); stream < count; stream += 32) {
        const uint32_t first = LoadAcquireDevice(&next[stream]);
        total += first;
        if (first >= static_cast<uint32_t>(streams.NumItems(stream))) continue;
        is_left = true;
        if (ready >= 0) continue;
        if (streams.IsReady(stream, static_cast<int>(first))) {
          ready = stream;
          index = first;
        } else {
          const int peer = streams.Peer(stream, static_cast<int>(first));
          missing = min(missing, static_cast<uint32_t>(peer));
        }
      }
      // The abort word overrides the flags, so it is loaded after them. It is forwarded before
      // anyone on this rank can see it, as in WaitForFlags.
      const uint32_t aborted =
          __shfl_sync(kFullWarp, LoadRelaxedSystem(&call.control->inbox->abort), 0);
      if (aborted != 0) {
        ForwardAbort(call, aborted);
        item.outcome = static_cast<Outcome>(aborted);
        break;
      }
      if (!__any_sync(kFullWarp, is_left)) break;
      const uint32_t lanes = __ballot_sync(kFullWarp, ready >= 0);
      if (lanes != 0) {
        // Blocks begin with different lanes, so that they take items of different streams.
        const int shift = role.block % 32;
        const uint32_t rotated = lanes >> shift | (shift == 0 ? 0 : lanes << (32 - shift));
        const int chosen = (__ffs(rotated) - 1 + shift) % 32;
        bool is_mine = false;
        if (LaneIndex() == chosen) {
          is_mine = atomicCAS(&next[ready], index, index + 1) == index;
        }
        if (!__any_sync(kFullWarp, is_mine)) continue;
        item.stream = __shfl_sync(kFullWarp, ready, chosen);
        item.index = static_cast<int>(__shfl_sync(kFullWarp, index, chosen));
        break;
      }
      // What other blocks take is progress, too.
      const uint32_t sum = __reduce_add_sync(kFullWarp, total);
      if (sum != seen) {
        entry.Restart();
        progress.Restart();
        seen = sum;
      }
      missing = __reduce_min_sync(kFullWarp, missing);
      item.outcome = (streams.HasEntered() ? progress : entry).Check(missing);
      if (item.outcome != Outcome::kArrived) break;
      __nanosleep(100);
    }
    if (item.outcome != Outcome::kArrived && LaneIndex() == 0) RecordFailure(call, item.outcome);
    __syncwarp();  // orders what the lanes have acquired before what the first one stores
    if (LaneIndex() == 0) *scratch = item;
  }
  // Orders what the first warp has acquired before what the role does next.
  role.Sync();
  return *scratch;
}

// Called by a role. Runs items by streams.Run(item) until there are none left, or a wait fails.
template <typename Streams>
__device__ inline Outcome RunStreams(const CallParams& call, const RoleContext& role,
                                     Streams& streams, uint32_t* next, uint64_t sequence,
                                     StreamItem* scratch) {
  while (true) {
    const StreamItem item = NextItem(call, role, streams, next, sequence, scratch);
    if (item.outcome != Outcome::kArrived || item.stream < 0) return item.outcome;
    streams.Run(item.stream, item.index);
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_STREAMS_CUH_
