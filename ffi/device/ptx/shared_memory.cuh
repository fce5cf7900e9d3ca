// Shared memory of a block: its addresses, and ld.shared and st.shared.
#ifndef JAX_EP_DEVICE_PTX_SHARED_MEMORY_CUH_
#define JAX_EP_DEVICE_PTX_SHARED_MEMORY_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Returns the dynamic shared memory of the launch.
__device__ inline uint8_t* DynamicSharedMemory() {
  extern __shared__ __align__(1024) uint8_t dynamic_shared_memory[];
  return dynamic_shared_memory;
}

// Returns the address in the shared state space, as ld.shared, mbarrier and TMA take it.
__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void StoreShared(uint32_t to, uint4 vector) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(vector.x), "r"(vector.y),
               "r"(vector.z), "r"(vector.w)
               : "memory");
}

__device__ inline void StoreShared(uint32_t to, const float* values) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(values[0]), "f"(values[1])
               : "memory");
}

__device__ inline void StoreShared(uint32_t to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}

__device__ inline void StoreShared(uint32_t to, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

__device__ inline void StoreShared(uint32_t to, uint16_t value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(value) : "memory");
}

__device__ inline uint4 LoadShared(uint32_t from) {
  uint4 vector;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(vector.x), "=r"(vector.y), "=r"(vector.z), "=r"(vector.w)
               : "r"(from)
               : "memory");
  return vector;
}

__device__ inline void LoadSharedPair(uint32_t from, uint32_t (&words)[2]) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(from)
               : "memory");
}

__device__ inline void LoadSharedPair(uint32_t from, float (&values)[2]) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(values[0]), "=f"(values[1])
               : "r"(from)
               : "memory");
}

__device__ inline uint32_t LoadSharedByte(uint32_t from) {
  uint32_t byte;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(from) : "memory");
  return byte;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_SHARED_MEMORY_CUH_
