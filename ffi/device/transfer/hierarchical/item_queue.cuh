// The items of a block: one warp takes them (streams.cuh), and the others run them. An item
// consists of units, such as the tokens of a chunk, which warps take one by one. The next item is
// found while the stores of the last one are performed.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_ITEM_QUEUE_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_ITEM_QUEUE_CUH_

#include "ffi/device/transfer/hierarchical/streams.cuh"

namespace jax_ep {

// In shared memory. Units are numbered over all items of the block.
struct ItemQueue {
  static constexpr int kItems = 2;  // one that runs, and the next one or the last one's stores
  struct Item {
    uint64_t units;         // the first one, and in the upper half their end
    int32_t stream;         // as in StreamItem
    int32_t index;          // likewise
    uint32_t num_finished;  // units
    uint32_t is_taken;      // until the warps have finished it
  };

  Item items[kItems];
  uint32_t next_unit;  // the first one that no warp has taken
  uint32_t end_unit;   // the end of all items so far
  uint32_t is_over;    // there are no more items
};

// An item that a block takes ahead of need, another one might run at once, and those that wait for
// it wait longer. Where blocks run many items that costs less than warps that wait for the next
// one: a block takes it when few units are left, elsewhere when all of its warps wait for a unit.
inline constexpr int kManyItems = 16;  // per block
inline constexpr int kFewUnits = 8;

// Called by one warp of the block, with the queue zeroed. Takes items until there are none left, or
// a wait fails.
template <typename Streams>
__device__ inline Outcome TakeItems(const CallParams& call, const RoleContext& role,
                                    const Streams& streams, ClaimWords* claims, uint64_t sequence,
                                    ItemQueue* queue) {
  InjectDelay(call, sequence, 1);
  // The last stream is one of the longest.
  const int num_items = streams.count() * streams.NumItems(streams.count() - 1);
  const bool is_ahead = num_items >= kManyItems * role.num_blocks;
  const int least_waiting = is_ahead ? -kFewUnits : role.NumWarps() - 1;
  uint32_t end = 0;
#pragma unroll 1
  for (int i = 0;; i = i + 1 == ItemQueue::kItems ? 0 : i + 1) {
    ItemQueue::Item& item = queue->items[i];
    {
      const ProfileSpan span(SpanKind::kWaitBlock);
      while (LoadAcquireBlock(&item.is_taken) != 0 ||
             static_cast<int32_t>(LoadAcquireBlock(&queue->next_unit) - end) < least_waiting) {
        __nanosleep(100);
      }
    }
    const ProfileSpan span(SpanKind::kWaitItem);
    const StreamItem taken = TakeItem(call, role.block, streams, claims, sequence, true);
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

// Called by one warp, for units of an item that it has run. The warp that counts the last units
// calls streams.Complete(stream, item).
template <typename Streams>
__device__ inline void FinishUnits(const Streams& streams, ItemQueue::Item& item,
                                   uint32_t num_units, uint32_t num_run) {
  const ProfileSpan span(SpanKind::kWaitItemStores);
  __syncwarp();
  bool is_last = false;
  if (LaneIndex() == 0) {
    FenceSystem();  // this warp's stores are performed before they are counted
    is_last = atomicAdd(&item.num_finished, num_run) + num_run == num_units;
    if (is_last) FenceSystem();  // as are those that the others have counted
  }
  if (!__shfl_sync(kFullWarp, is_last, 0)) return;
  __syncwarp();  // orders the first lane's fence before what the others signal
  streams.Complete(item.stream, item.index);
  __syncwarp();
  if (LaneIndex() == 0) StoreReleaseBlock(&item.is_taken, 0);
}

// Called by one warp. Returns whether there is such a unit, which may take a while to say.
__device__ inline bool WaitForUnit(ItemQueue* queue, uint32_t unit) {
  bool has_unit = true;
  if (LaneIndex() == 0) {
    while (LoadAcquireBlock(&queue->end_unit) <= unit) {
      // No item follows one that was added before.
      if (LoadAcquireBlock(&queue->is_over) != 0 && LoadAcquireBlock(&queue->end_unit) <= unit) {
        has_unit = false;
        break;
      }
      __nanosleep(40);
    }
  }
  has_unit = __shfl_sync(kFullWarp, has_unit, 0);
  __syncwarp();  // orders what the first lane has acquired before what the others do next
  return has_unit;
}

// Called by the other warps of the block. Each runs units by streams.RunUnit(stream, item, unit).
// The one that finishes the last unit of an item calls streams.Complete(stream, item), when all
// stores of the item are performed. A warp waits for its stores once per item, not after each unit.
template <typename Streams>
__device__ inline void RunUnits(Streams& streams, ItemQueue* queue) {
  int running = 0;              // the item whose units this warp runs
  uint32_t first = 0, end = 0;  // the item's units
  uint32_t num_run = 0;         // the units that this warp has run
#pragma unroll 1
  while (true) {
    uint32_t unit = 0;
    if (LaneIndex() == 0) unit = atomicAdd(&queue->next_unit, 1u);
    unit = __shfl_sync(kFullWarp, unit, 0);
    if (unit >= end) {
      if (num_run != 0) FinishUnits(streams, queue->items[running], end - first, num_run);
      {
        const ProfileSpan span(SpanKind::kWaitChunk);
        if (!WaitForUnit(queue, unit)) return;
      }
      // The item of the unit stays until the unit is finished. Others may be replaced meanwhile, by
      // items of later units.
      const int lane = LaneIndex();
      const uint64_t units =
          lane < ItemQueue::kItems ? LoadRelaxedBlock(&queue->items[lane].units) : 0;
      first = static_cast<uint32_t>(units);
      end = static_cast<uint32_t>(units >> 32);
      running = __ffs(__ballot_sync(kFullWarp, first <= unit && unit < end)) - 1;
      first = __shfl_sync(kFullWarp, first, running);
      end = __shfl_sync(kFullWarp, end, running);
      num_run = 0;
    }
    const ItemQueue::Item& item = queue->items[running];
    const ProfileSpan span(streams.SpanOf(item.stream));
    streams.RunUnit(item.stream, item.index, static_cast<int>(unit - first));
    ++num_run;
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_ITEM_QUEUE_CUH_
