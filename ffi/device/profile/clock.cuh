// The special registers that tell when and where a warp runs, for profiles.
#ifndef JAX_EP_DEVICE_PROFILE_CLOCK_CUH_
#define JAX_EP_DEVICE_PROFILE_CLOCK_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Returns threadIdx.x, read anew: kept for later, it would take a register.
__device__ inline uint32_t ReadThreadIndex() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Returns the low word of the SM's clock.
__device__ inline uint32_t ClockCycles() {
  uint32_t now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
  return now;
}

__device__ inline uint32_t SmIndex() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(index));
  return index;
}

// Returns the low word of what distinguishes grids that run at the same time.
__device__ inline uint32_t GridIndex() {
  uint64_t index;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(index));
  return static_cast<uint32_t>(index);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROFILE_CLOCK_CUH_
