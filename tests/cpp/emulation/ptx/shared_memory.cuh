// Replaces ffi/device/ptx/shared_memory.cuh: addresses of shared memory are offsets.
#ifndef JAX_EP_DEVICE_PTX_SHARED_MEMORY_CUH_
#define JAX_EP_DEVICE_PTX_SHARED_MEMORY_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

inline uint8_t* DynamicSharedMemory() { return emulation::SharedMemory(); }
inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - emulation::SharedMemory());
}

inline uint4 LoadShared(uint32_t from) {
  uint4 chunk;
  std::memcpy(&chunk, emulation::SharedMemory() + from, sizeof chunk);
  return chunk;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_SHARED_MEMORY_CUH_
