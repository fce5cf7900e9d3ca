// In the place of ffi/device/async_copy.cuh: addresses of shared memory are offsets.
#ifndef JAX_EP_DEVICE_ASYNC_COPY_CUH_
#define JAX_EP_DEVICE_ASYNC_COPY_CUH_

#include "ffi/device/integers.h"

namespace jax_ep {

inline uint8_t* DynamicSharedMemory() { return emulation::SharedMemory(); }
inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - emulation::SharedMemory());
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_ASYNC_COPY_CUH_
