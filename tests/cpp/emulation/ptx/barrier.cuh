// Replaces ffi/device/ptx/barrier.cuh.
#ifndef JAX_EP_DEVICE_PTX_BARRIER_CUH_
#define JAX_EP_DEVICE_PTX_BARRIER_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

inline bool ElectOne() { return threadIdx.x % 32 == 0; }
inline void NamedBarrier(int number, int threads) {
  emulation::BarrierOfSome(number, static_cast<unsigned>(threads));
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_BARRIER_CUH_
