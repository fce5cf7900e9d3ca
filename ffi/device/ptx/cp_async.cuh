// cp.async: copies from global to shared memory that run while the thread goes on.
#ifndef JAX_EP_DEVICE_PTX_CP_ASYNC_CUH_
#define JAX_EP_DEVICE_PTX_CP_ASYNC_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Copies kBytes. If !valid it writes zeros instead and reads nothing, wherever `from` points. Both
// addresses are multiples of kBytes.
template <int kBytes>
__device__ inline void CpAsync(uint32_t to, const void* from, bool valid) {
  static_assert(kBytes == 4 || kBytes == 16, "of the sizes there are, those that are used");
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    // Not through L1, where nobody looks for the data again. L2 takes the whole line, because lines
    // of 64 bytes are read in two steps.
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
  }
}

// Closes a batch of this thread's copies.
__device__ inline void CpAsyncCommitGroup() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's batches but the last kPending. Other threads' need a barrier after it.
template <int kPending>
__device__ inline void CpAsyncWaitGroup() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_CP_ASYNC_CUH_
