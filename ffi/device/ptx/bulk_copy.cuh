// Bulk copies of consecutive bytes (cp.async.bulk), and bulk async-groups (sm_90). Addresses and
// sizes are multiples of 16. Each function is called by one thread.
#ifndef JAX_EP_DEVICE_PTX_BULK_COPY_CUH_
#define JAX_EP_DEVICE_PTX_BULK_COPY_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Copies global to shared memory, and completes `bytes` of the mbarrier's transaction count.
__device__ inline void BulkLoad(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Copies shared to global memory, as part of this thread's next bulk group.
__device__ inline void BulkStore(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// Orders generic-proxy and async-proxy accesses of this thread. Accesses that it has observed, by
// its own acquire or by a barrier after another thread's acquire, come before the bulk copies that
// it issues from here on. Bulk copies that it has waited for come before its later accesses.
__device__ inline void FenceProxyAsync() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Closes the bulk group of this thread's stores.
__device__ inline void BulkCommitGroup() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Wait for all bulk groups of this thread but the latest kPending: until their shared memory may be
// reused (Read), or until their stores are complete.
template <int kPending>
__device__ inline void BulkWaitGroupRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ inline void BulkWaitGroup() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// Makes this thread's stores to shared memory visible to the bulk copies that follow.
__device__ inline void FenceProxyAsyncShared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_BULK_COPY_CUH_
