// The shared memory of a block: its addresses, and loads and stores of the shared state space.
#ifndef JAX_EP_DEVICE_PTX_SHARED_MEMORY_CUH_
#define JAX_EP_DEVICE_PTX_SHARED_MEMORY_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// What the launch asked for.
__device__ inline uint8_t* DynamicSharedMemory() {
  extern __shared__ __align__(1024) uint8_t dynamic_shared_memory[];
  return dynamic_shared_memory;
}

// The address as the instructions of the shared space want it.
__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void StoreShared(uint32_t to, uint4 chunk) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(chunk.x), "r"(chunk.y),
               "r"(chunk.z), "r"(chunk.w)
               : "memory");
}

__device__ inline void StoreShared(uint32_t to, const float* values) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(values[0]), "f"(values[1])
               : "memory");
}

__device__ inline uint4 LoadShared(uint32_t from) {
  uint4 chunk;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
               : "r"(from)
               : "memory");
  return chunk;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_SHARED_MEMORY_CUH_
