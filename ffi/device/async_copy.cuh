// The shared memory of a block, and copies into it from global memory that run while the thread
// goes on.
#ifndef JAX_EP_DEVICE_ASYNC_COPY_CUH_
#define JAX_EP_DEVICE_ASYNC_COPY_CUH_

#include "ffi/device/integers.h"

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

__device__ inline void StoreChunk(uint32_t to, uint4 chunk) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(chunk.x), "r"(chunk.y),
               "r"(chunk.z), "r"(chunk.w)
               : "memory");
}

__device__ inline void StorePair(uint32_t to, const float* values) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(values[0]), "f"(values[1])
               : "memory");
}

__device__ inline uint4 LoadChunk(uint32_t from) {
  uint4 chunk;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
               : "r"(from)
               : "memory");
  return chunk;
}

// Copies kBytes. If !valid it writes zeros instead and reads nothing, wherever `from` points. Both
// addresses are multiples of kBytes.
template <int kBytes>
__device__ inline void CopyAsync(uint32_t to, const void* from, bool valid) {
  static_assert(kBytes == 4 || kBytes == 16, "of the sizes there are, those that are used");
  const int bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    // Not through L1, where nobody looks for the data again. L2 takes the whole line, because lines
    // of 64 bytes are read in two steps.
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
                 : "memory");
  }
}

// Closes a batch of this thread's copies.
__device__ inline void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's batches but the last kPending. Other threads' need a barrier after it.
template <int kPending>
__device__ inline void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_ASYNC_COPY_CUH_
