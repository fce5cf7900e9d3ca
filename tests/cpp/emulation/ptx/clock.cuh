// Replaces ffi/device/profile/clock.cuh: a clock of all SMs, which goes on as it is read.
#ifndef JAX_EP_DEVICE_PROFILE_CLOCK_CUH_
#define JAX_EP_DEVICE_PROFILE_CLOCK_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

inline uint32_t ReadThreadIndex() { return threadIdx.x; }

inline uint32_t ClockCycles() {
  static std::atomic<uint32_t> clock = 0xffffff00u;  // wraps around soon
  return clock++;
}

inline uint32_t SmIndex() { return blockIdx.x; }
inline uint32_t GridIndex() { return 0; }

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROFILE_CLOCK_CUH_
