// mbarrier: barriers in shared memory that count thread arrivals and bytes of async copies (sm_90).
// All addresses are shared addresses (SharedAddress).
#ifndef JAX_EP_DEVICE_PTX_MBARRIER_CUH_
#define JAX_EP_DEVICE_PTX_MBARRIER_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

__device__ inline void MbarrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes MbarrierInit visible to the async proxy and the cluster. A barrier of the threads follows.
__device__ inline void FenceMbarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Does not wait for earlier loads whose values are unused.
__device__ inline void MbarrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds `bytes` of copies to what the phase waits for.
__device__ inline void MbarrierArriveExpectTx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity is complete. The copied data can be read then.
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

// Returns whether the phase of this parity is complete, without waiting. May return false
// spuriously.
__device__ inline bool MbarrierTestWait(uint32_t barrier, uint32_t parity) {
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
