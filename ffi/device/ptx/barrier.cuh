// Barriers of some threads of a block, and the election of one thread of a warp.
#ifndef JAX_EP_DEVICE_PTX_BARRIER_CUH_
#define JAX_EP_DEVICE_PTX_BARRIER_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// One thread of a warp, always the same. The compiler knows that it is one, and keeps its addresses
// and coordinates in the registers that copies take them from: a copy is 4 instructions then
// instead of 13.
__device__ inline bool ElectOne() {
  uint32_t is_elected;
  asm volatile(
      "{\n.reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n}"
      : "=r"(is_elected));
  return is_elected != 0;
}

// Of `threads` threads of the block, by number 1 to 15.
__device__ inline void NamedBarrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_BARRIER_CUH_
