// Copies of consecutive bytes by the copy engine (sm_90). Addresses and sizes are multiples of 16.
// Each by one thread.
#ifndef JAX_EP_DEVICE_BULK_COPY_CUH_
#define JAX_EP_DEVICE_BULK_COPY_CUH_

#include "ffi/device/mbarrier.cuh"

namespace jax_ep {

// From memory to shared memory; completes the bytes at the barrier.
__device__ inline void BulkLoad(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// From shared memory; belongs to the thread's next CommitStores.
__device__ inline void BulkStore(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// What this thread knows to have happened to memory, by an acquire of its own or a barrier after
// another's, comes before the copies that it begins from here on; and copies that it knows to be
// complete before its own accesses.
__device__ inline void FenceProxy() { asm volatile("fence.proxy.async;" ::: "memory"); }

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_BULK_COPY_CUH_
