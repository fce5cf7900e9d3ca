// Barriers of a subset of a block's threads, and election of one thread per warp.
#ifndef JAX_EP_DEVICE_PTX_BARRIER_CUH_
#define JAX_EP_DEVICE_PTX_BARRIER_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Returns true in one thread of a warp, always the same one. The compiler then knows that the
// branch is taken by a single thread and keeps addresses and coordinates in uniform registers: a
// TMA copy is 4 instructions instead of 13.
__device__ inline bool ElectOne() {
  uint32_t is_elected;
  asm volatile(
      "{\n.reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n}"
      : "=r"(is_elected));
  return is_elected != 0;
}

// Waits for `threads` threads of the block at barrier `number`, 1 to 15.
__device__ inline void NamedBarrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_BARRIER_CUH_
