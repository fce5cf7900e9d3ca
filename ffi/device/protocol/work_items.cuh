// Work items of a kernel, handed out in order by ticket counters.
//
// A block may wait for flags of peers, and for the holders of lower tickets, which are running. It
// waits for nothing else, so a kernel makes progress with any number of blocks, whenever they
// start.
#ifndef JAX_EP_DEVICE_PROTOCOL_WORK_ITEMS_CUH_
#define JAX_EP_DEVICE_PROTOCOL_WORK_ITEMS_CUH_

#include "ffi/device/profile/recorder.cuh"
#include "ffi/device/protocol/role_context.cuh"
#include "ffi/device/ptx/memory.cuh"

namespace jax_ep {

// Called by a role. Returns the next ticket of its threads in this block.
__device__ inline int NextTicket(uint32_t* tickets, const RoleContext& role) {
  role.Sync();  // the previous ticket has been read
  if (role.Thread() == 0) role.scratch->ticket = static_cast<int>(atomicAdd(tickets, 1u));
  role.Sync();
  return role.scratch->ticket;
}

// Called by the role that did a work item. Counts the item as finished. `stores_to_peers`: the item
// stored to peers.
__device__ inline void FinishItem(uint32_t* finished, bool stores_to_peers,
                                  const RoleContext& role) {
  role.Sync();  // the role's accesses happen before what its first thread does next
  if (role.Thread() == 0) {
    // The fence performs this block's stores to peers at system scope. The last block's release
    // would cover them by causality (counter: release here, acquire there). With a fence in each
    // block, one SM's fence does not have to wait for another SM's stores. Stores to this device's
    // memory need only the counter.
    if (stores_to_peers) FenceSystem();
    AddAcquireReleaseDevice(finished, 1);
  }
}

// Returns whether `total` items are finished. Acquire.
__device__ inline bool AreItemsFinished(const uint32_t* finished, uint32_t total) {
  return LoadAcquireDevice(finished) >= total;
}

// Called by the first lane of a warp. Waits until `total` items are finished, which lower tickets
// hold.
__device__ inline void WaitForItems(const uint32_t* finished, uint32_t total) {
  const ProfileSpan span(SpanKind::kWaitItems);
  while (!AreItemsFinished(finished, total)) __nanosleep(20);  // WAIT_LOCAL
}

// Called by one warp. Returns the warp's next ticket.
__device__ inline int NextWarpTicket(uint32_t* tickets) {
  const uint32_t ticket = IncrementRelaxedDevice(tickets, LaneIndex() == 0);
  return static_cast<int>(__shfl_sync(0xffffffffu, ticket, 0));
}

// Tickets of one warp, requested one ahead. Used where no item waits for a higher ticket, since
// that ticket may be this warp's next. In a dispatch, a token waits only for tokens of earlier
// chunks.
class WarpTicketPrefetch {
 public:
  // Requests no ticket if !is_used.
  __device__ explicit WarpTicketPrefetch(uint32_t* tickets, bool is_used = true)
      : tickets_(tickets), requested_(Request(is_used)) {}

  __device__ int Next() {
    const uint32_t ticket = __shfl_sync(0xffffffffu, requested_, 0);
    requested_ = Request(true);
    return static_cast<int>(ticket);
  }

  // Waits for the ticket requested last.
  __device__ void Wait() { requested_ = __shfl_sync(0xffffffffu, requested_, 0); }

 private:
  __device__ uint32_t Request(bool is_used) const {
    return IncrementRelaxedDevice(tickets_, is_used && LaneIndex() == 0);
  }

  uint32_t* const tickets_;
  uint32_t requested_;  // in lane 0
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_WORK_ITEMS_CUH_
