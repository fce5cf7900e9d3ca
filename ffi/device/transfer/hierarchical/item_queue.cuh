// The items of a block: one warp takes them (streams.cuh), ahead of need, and the others run them.
// An item consists of units, such as the tokens of a chunk. Each warp takes the next unit when it
// has finished one, of whatever item, so warps do not wait for each other, nor for the next item.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_ITEM_QUEUE_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_ITEM_QUEUE_CUH_

#include "ffi/device/transfer/hierarchical/streams.cuh"

namespace jax_ep {

// In shared memory. Units are numbered over all items of the block.
struct ItemQueue {
  static constexpr int kItems = 2;  // one that runs, and one ahead
  struct Item {
    uint64_t units;         // the first one, and in the upper half their end
    int32_t stream;         // as in StreamItem
    int32_t index;          // likewise
    uint32_t num_finished;  // units
    uint32_t is_taken;      // until the warps have finished it
  };

  Item items[kItems];
  uint32_t next_unit;  // that no warp has taken
  uint32_t end_unit;   // of the items so far
  uint32_t is_over;    // there are no more items
};

// The next item is taken when no more units than these are left. An item that is taken earlier is
// later for those that wait for it, as another block might run it at once.
inline constexpr uint32_t kUnitsAhead = 8;

// Called by one warp of the block, with the queue zeroed. Takes items until there are none left, or
// a wait fails.
template <typename Streams>
__device__ inline Outcome TakeItems(const CallParams& call, int block, const Streams& streams,
                                    ClaimWords* claims, uint64_t sequence, ItemQueue* queue) {
  InjectDelay(call, sequence, 1);
  uint32_t end = 0;
#pragma unroll 1
  for (int i = 0;; i = i + 1 == ItemQueue::kItems ? 0 : i + 1) {
    ItemQueue::Item& item = queue->items[i];
    {
      const ProfileSpan span(SpanKind::kWaitBlock);
      while (LoadAcquireBlock(&item.is_taken) != 0 ||
             LoadAcquireBlock(&queue->next_unit) + kUnitsAhead < end) {
        __nanosleep(100);
      }
    }
    const ProfileSpan span(SpanKind::kWaitItem);
    const StreamItem taken = TakeItem(call, block, streams, claims, sequence, true);
    const bool is_over = taken.outcome != Outcome::kArrived || taken.stream == kNoneLeft;
    if (is_over) {
      if (LaneIndex() == 0) StoreReleaseBlock(&queue->is_over, 1);
      return taken.outcome;
    }
    const uint32_t first = end;
    end += streams.NumUnits(taken.stream, taken.index);
    if (LaneIndex() == 0) {
      item.stream = taken.stream;
      item.index = taken.index;
      item.num_finished = 0;
      item.is_taken = 1;
      StoreRelaxedBlock(&item.units, first | uint64_t{end} << 32);
      // Orders what this warp has acquired, and the item, before what warps do that find it.
      StoreReleaseBlock(&queue->end_unit, end);
    }
    __syncwarp();
  }
}

// Called by the other warps of the block. Each runs units by streams.RunUnit(stream, item, unit).
// The one that finishes the last unit of an item calls streams.Complete(stream, item), when all
// stores of the item are performed.
template <typename Streams>
__device__ inline void RunUnits(Streams& streams, ItemQueue* queue) {
#pragma unroll 1
  while (true) {
    uint32_t unit = 0;
    bool has_unit = true;
    {
      const ProfileSpan span(SpanKind::kWaitChunk);
      if (LaneIndex() == 0) {
        unit = atomicAdd(&queue->next_unit, 1u);
        while (LoadAcquireBlock(&queue->end_unit) <= unit) {
          // No item follows one that was added before.
          if (LoadAcquireBlock(&queue->is_over) != 0 &&
              LoadAcquireBlock(&queue->end_unit) <= unit) {
            has_unit = false;
            break;
          }
          __nanosleep(40);
        }
      }
      if (!__shfl_sync(kFullWarp, has_unit, 0)) return;
      unit = __shfl_sync(kFullWarp, unit, 0);
      __syncwarp();  // orders what the first lane has acquired before what the others do next
    }
    // The item of the unit stays until the unit is finished. Others may be replaced meanwhile, by
    // items of later units.
    const int lane = LaneIndex();
    const uint64_t units =
        lane < ItemQueue::kItems ? LoadRelaxedBlock(&queue->items[lane].units) : 0;
    const auto first = static_cast<uint32_t>(units);
    const auto end = static_cast<uint32_t>(units >> 32);
    const int found = __ffs(__ballot_sync(kFullWarp, first <= unit && unit < end)) - 1;
    ItemQueue::Item& item = queue->items[found];
    const int stream = item.stream;
    const int index = item.index;
    const uint32_t num_units = __shfl_sync(kFullWarp, end - first, found);
    {
      const ProfileSpan span(streams.SpanOf(stream));
      streams.RunUnit(stream, index, static_cast<int>(unit - __shfl_sync(kFullWarp, first, found)));
    }
    __syncwarp();
    const ProfileSpan span(SpanKind::kWaitItemStores);
    bool is_last = false;
    if (lane == 0) {
      FenceSystem();  // this warp's stores are performed before they are counted
      is_last = atomicAdd(&item.num_finished, 1u) + 1 == num_units;
      if (is_last) FenceSystem();  // as are those that the others have counted
    }
    if (!__shfl_sync(kFullWarp, is_last, 0)) continue;
    __syncwarp();  // orders the first lane's fence before what the others signal
    streams.Complete(stream, index);
    __syncwarp();
    if (lane == 0) StoreReleaseBlock(&item.is_taken, 0);
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_ITEM_QUEUE_CUH_
