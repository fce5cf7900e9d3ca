// Memory operations with a scope and an order. None goes through the read-only cache, which would
// keep data that a peer has since overwritten.
#ifndef JAX_EP_DEVICE_PTX_MEMORY_CUH_
#define JAX_EP_DEVICE_PTX_MEMORY_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

__device__ inline uint64_t LoadAcquireSystem(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline uint32_t LoadAcquireSystem(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline uint64_t LoadRelaxedSystem(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline uint32_t LoadRelaxedSystem(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline void StoreReleaseSystem(uint64_t* address, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ inline void StoreReleaseSystem(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ inline void StoreRelaxedSystem(uint64_t* address, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ inline uint64_t LoadAcquireDevice(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline uint32_t LoadAcquireDevice(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline void StoreReleaseDevice(uint64_t* address, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ inline void StoreReleaseDevice(uint32_t* address, uint32_t value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// These take addresses in shared memory, too.
__device__ inline uint32_t LoadAcquireBlock(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline uint64_t LoadRelaxedBlock(const uint64_t* address) {
  uint64_t value;
  asm volatile("ld.relaxed.cta.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline void StoreReleaseBlock(uint32_t* address, uint32_t value) {
  asm volatile("st.release.cta.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ inline void StoreRelaxedBlock(uint64_t* address, uint64_t value) {
  asm volatile("st.relaxed.cta.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ inline void FenceBlock() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

__device__ inline void FenceDevice() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
__device__ inline void FenceSystem() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ inline uint32_t AddAcquireReleaseDevice(uint32_t* address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

__device__ inline void AddReleaseDevice(uint64_t* address, uint64_t value) {
  asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ inline void MaxRelaxedDevice(uint64_t* address, uint64_t value) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
}

__device__ inline uint64_t CompareAndSwapDevice(uint64_t* address, uint64_t expected,
                                                uint64_t value) {
  uint64_t before;
  asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(address), "l"(expected), "l"(value)
               : "memory");
  return before;
}

__device__ inline uint64_t CompareAndSwapRelaxedDevice(uint64_t* address, uint64_t expected,
                                                       uint64_t value) {
  uint64_t before;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(address), "l"(expected), "l"(value)
               : "memory");
  return before;
}

// These two return 0 where they are not wanted. A predicate lets the warp go on until it uses the
// result. At the end of a branch it would wait.
__device__ inline uint64_t OrRelaxedDevice(uint64_t* address, uint64_t bits, bool is_wanted) {
  uint64_t before = 0;
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %3, 0;\n"
      "@wanted atom.relaxed.gpu.global.or.b64 %0, [%1], %2;\n}"
      : "+l"(before)
      : "l"(address), "l"(bits), "r"(uint32_t{is_wanted})
      : "memory");
  return before;
}

// Not an addition: ptxas would add up those of a warp first, and wait in that branch.
__device__ inline uint32_t IncrementRelaxedDevice(uint32_t* address, bool is_wanted) {
  uint32_t before = 0;
  asm volatile(
      "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %2, 0;\n"
      "@wanted atom.relaxed.gpu.global.inc.u32 %0, [%1], 0x7fffffff;\n}"
      : "+r"(before)
      : "l"(address), "r"(uint32_t{is_wanted})
      : "memory");
  return before;
}

__device__ inline uint32_t CompareAndSwapSystem(uint32_t* address, uint32_t expected,
                                                uint32_t value) {
  uint32_t before;
  asm volatile("atom.acq_rel.sys.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(before)
               : "l"(address), "r"(expected), "r"(value)
               : "memory");
  return before;
}

// Store and load 16 aligned bytes at once: a load sees all of a store or none of it. They order no
// other accesses.
__device__ inline void StoreRelaxedSystem(void* address, uint64_t low, uint64_t high) {
  asm volatile(
      "{\n.reg .b128 value;\nmov.b128 value, {%1, %2};\n"
      "st.relaxed.sys.global.b128 [%0], value;\n}" ::"l"(address),
      "l"(low), "l"(high)
      : "memory");
}

__device__ inline void LoadRelaxedSystem(const void* address, uint64_t* low, uint64_t* high) {
  asm volatile(
      "{\n.reg .b128 value;\nld.relaxed.sys.global.b128 value, [%2];\n"
      "mov.b128 {%0, %1}, value;\n}"
      : "=l"(*low), "=l"(*high)
      : "l"(address)
      : "memory");
}

// Loads data that peers store into this rank's workspace. An earlier wait orders it, so the load
// itself is weak. It is volatile: the compiler must neither move it across the wait nor use
// ld.global.nc.
__device__ inline uint4 LoadGlobalNoAllocate(const uint4* address) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}

__device__ inline int2 LoadGlobalNoAllocate(const int2* address) {
  int2 value;
  asm volatile("ld.global.L1::no_allocate.v2.s32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "l"(address));
  return value;
}

__device__ inline int32_t LoadGlobalNoAllocate(const int32_t* address) {
  int32_t value;
  asm volatile("ld.global.L1::no_allocate.s32 %0, [%1];" : "=r"(value) : "l"(address));
  return value;
}

__device__ inline uint8_t LoadGlobalNoAllocate(const uint8_t* address) {
  uint32_t value;
  asm volatile("ld.global.L1::no_allocate.u8 %0, [%1];" : "=r"(value) : "l"(address));
  return static_cast<uint8_t>(value);
}

__device__ inline float LoadGlobalNoAllocate(const float* address) {
  float value;
  asm volatile("ld.global.L1::no_allocate.f32 %0, [%1];" : "=f"(value) : "l"(address));
  return value;
}

// Loads 16 bytes. Volatile: the compiler does not move the load down to where the words are used.
__device__ inline void LoadGlobal(const void* address, uint32_t (&words)[4]) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(address)
               : "memory");
}

__device__ inline void PrefetchToL1(const void* address) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(address) : "memory");
}
__device__ inline void PrefetchToL2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// Returns the time in nanoseconds.
__device__ inline uint64_t GlobalTimer() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_MEMORY_CUH_
