// Parts of a kernel's work, handed out in order to whichever block comes next.
//
// A block may wait for what the holders of lower tickets do, as these are running, and for remote
// flags; for nothing else. So any number of blocks makes progress, whenever they start.
#ifndef JAX_EP_DEVICE_PROTOCOL_WORK_ITEMS_CUH_
#define JAX_EP_DEVICE_PROTOCOL_WORK_ITEMS_CUH_

#include "ffi/device/common/thread_group.cuh"
#include "ffi/device/ptx/memory.cuh"

namespace jax_ep {

// The next part for these threads of a block.
__device__ inline int NextTicket(uint32_t* tickets, const ThreadGroup& threads) {
  __shared__ int ticket;
  threads.Sync();  // the previous one has been read
  if (threads.number == 0) ticket = static_cast<int>(atomicAdd(tickets, 1u));
  threads.Sync();
  return ticket;
}

// Until all of `total` lower tickets are finished. By one thread.
__device__ inline void WaitForItems(const uint32_t* finished, uint32_t total) {
  while (LoadAcquireDevice(finished) < total) __nanosleep(20);  // WAIT_LOCAL
}

// The same by a block. What their blocks did is seen by the first thread, and by all of a block
// after its next barrier.
__device__ inline void WaitForItemsOfBlock(const uint32_t* finished, uint32_t total) {
  if (threadIdx.x == 0) WaitForItems(finished, total);
}

// The next part for this warp.
__device__ inline int NextWarpTicket(uint32_t* tickets) {
  int ticket = 0;
  if (threadIdx.x % 32 == 0) ticket = static_cast<int>(atomicAdd(tickets, 1u));
  return __shfl_sync(0xffffffffu, ticket, 0);
}

// The same, asked for one ahead: where a part waits for nothing that a higher ticket, which may be
// this warp's next, has to do. A dispatch's tokens wait for what is earlier by a chunk.
class WarpTicketPrefetch {
 public:
  __device__ explicit WarpTicketPrefetch(uint32_t* tickets, bool has_use = true)
      : tickets_(tickets) {
    if (has_use) Ask();
  }

  __device__ int Next() {
    const int ticket = __shfl_sync(0xffffffffu, asked_, 0);
    Ask();
    return ticket;
  }

 private:
  __device__ void Ask() {
    if (threadIdx.x % 32 == 0) asked_ = static_cast<int>(atomicAdd(tickets_, 1u));
  }

  uint32_t* const tickets_;
  int asked_ = 0;  // in lane 0
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_WORK_ITEMS_CUH_
