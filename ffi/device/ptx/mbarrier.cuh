// mbarrier: barriers in shared memory that count arrivals of threads and bytes of bulk copies
// (sm_90).
#ifndef JAX_EP_DEVICE_PTX_MBARRIER_CUH_
#define JAX_EP_DEVICE_PTX_MBARRIER_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// All addresses are of the shared space.
__device__ inline void MbarrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After MbarrierInit, before other threads and the copy engine see the barriers.
__device__ inline void FenceMbarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Does not wait for loads before it whose words are not used.
__device__ inline void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for so many bytes of copies.
__device__ inline void MbarrierArriveExpectTx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Returns when the phase of this parity is complete: what was copied for it can be read.
__device__ inline void MbarrierWait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether that phase is complete; may also say so of none, late.
__device__ inline bool IsComplete(uint32_t barrier, uint32_t parity) {
  uint32_t is_complete;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(is_complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return is_complete != 0;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_MBARRIER_CUH_
