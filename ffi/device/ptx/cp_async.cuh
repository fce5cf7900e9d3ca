// cp.async: asynchronous copies from global to shared memory.
#ifndef JAX_EP_DEVICE_PTX_CP_ASYNC_CUH_
#define JAX_EP_DEVICE_PTX_CP_ASYNC_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Copies kBytes; both addresses are multiples of kBytes. If !valid, it writes zeros and does not
// dereference `from`.
template <int kBytes>
__device__ inline void CpAsync(uint32_t to, const void* from, bool valid) {
  static_assert(kBytes == 4 || kBytes == 16, "only copies of 4 and of 16 bytes are implemented");
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    // Bypasses L1, since the data is read only once. L2 fetches the whole 128-byte line: rows of
    // 64 bytes read it in two steps.
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
  }
}

// Closes the group of this thread's copies.
__device__ inline void CpAsyncCommitGroup() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Arrives at an mbarrier of sm_90 when all earlier copies of this thread are complete.
__device__ inline void CpAsyncMbarrierArrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Waits for all groups of this thread but the latest kPending. A barrier after it covers the groups
// of other threads.
template <int kPending>
__device__ inline void CpAsyncWaitGroup() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_CP_ASYNC_CUH_
