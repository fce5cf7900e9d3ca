// Bulk copies of consecutive bytes, and bulk async-groups (sm_90). Addresses and sizes are
// multiples of
// 16. Each function is called by one thread.
#ifndef JAX_EP_DEVICE_PTX_BULK_COPY_CUH_
#define JAX_EP_DEVICE_PTX_BULK_COPY_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// From memory to shared memory; completes the bytes at the barrier.
__device__ inline void BulkLoad(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// From shared memory; belongs to the thread's next BulkCommitGroup.
__device__ inline void BulkStore(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// What this thread knows to have happened to memory, by an acquire of its own or a barrier after
// another's, comes before the copies that it begins from here on; and copies that it knows to be
// complete before its own accesses.
__device__ inline void FenceProxyAsync() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Closes a batch of this thread's copies to tensors.
__device__ inline void BulkCommitGroup() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits for all of this thread's batches but the last kPending: until their shared memory may be
// written again, or until they are complete.
template <int kPending>
__device__ inline void BulkWaitGroupRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ inline void BulkWaitGroup() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// What this thread stored to shared memory is seen by copies that follow.
__device__ inline void FenceProxyAsyncShared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_BULK_COPY_CUH_
