// Replaces ffi/device/ptx/memory.cuh: every ordered access is sequentially consistent.
#ifndef JAX_EP_DEVICE_PTX_MEMORY_CUH_
#define JAX_EP_DEVICE_PTX_MEMORY_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

template <typename T>
T LoadAtomic(const T* address) {
  return std::atomic_ref<T>(*const_cast<T*>(address)).load();
}
template <typename T>
void StoreAtomic(T* address, T value) {
  std::atomic_ref<T>(*address).store(value);
}

inline uint64_t LoadAcquireSystem(const uint64_t* address) { return LoadAtomic(address); }
inline uint32_t LoadAcquireSystem(const uint32_t* address) { return LoadAtomic(address); }
inline uint64_t LoadRelaxedSystem(const uint64_t* address) { return LoadAtomic(address); }
inline uint32_t LoadRelaxedSystem(const uint32_t* address) { return LoadAtomic(address); }
inline void StoreReleaseSystem(uint64_t* address, uint64_t value) { StoreAtomic(address, value); }
inline void StoreReleaseSystem(uint32_t* address, uint32_t value) { StoreAtomic(address, value); }
inline void StoreRelaxedSystem(uint64_t* address, uint64_t value) { StoreAtomic(address, value); }
inline uint64_t LoadAcquireDevice(const uint64_t* address) { return LoadAtomic(address); }
inline uint32_t LoadAcquireDevice(const uint32_t* address) { return LoadAtomic(address); }
inline void StoreReleaseDevice(uint64_t* address, uint64_t value) { StoreAtomic(address, value); }
inline void StoreReleaseDevice(uint32_t* address, uint32_t value) { StoreAtomic(address, value); }
inline uint32_t LoadAcquireBlock(const uint32_t* address) { return LoadAtomic(address); }
inline uint64_t LoadRelaxedBlock(const uint64_t* address) { return LoadAtomic(address); }
inline void StoreReleaseBlock(uint32_t* address, uint32_t value) { StoreAtomic(address, value); }
inline void StoreRelaxedBlock(uint64_t* address, uint64_t value) { StoreAtomic(address, value); }
// The upper half is stored last and loaded first: a reader that sees it sees the lower half, too.
inline void StoreRelaxedSystem(void* address, uint64_t low, uint64_t high) {
  StoreAtomic(static_cast<uint64_t*>(address), low);
  StoreAtomic(static_cast<uint64_t*>(address) + 1, high);
}
inline void LoadRelaxedSystem(const void* address, uint64_t* low, uint64_t* high) {
  *high = LoadAtomic(static_cast<const uint64_t*>(address) + 1);
  *low = LoadAtomic(static_cast<const uint64_t*>(address));
}
inline void FenceBlock() { std::atomic_thread_fence(std::memory_order_acq_rel); }
inline void FenceDevice() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void FenceSystem() { std::atomic_thread_fence(std::memory_order_seq_cst); }

inline uint32_t AddAcquireReleaseDevice(uint32_t* address, uint32_t value) {
  return std::atomic_ref<uint32_t>(*address).fetch_add(value);
}
inline void AddReleaseDevice(uint64_t* address, uint64_t value) {
  std::atomic_ref<uint64_t>(*address).fetch_add(value);
}
inline void MaxRelaxedDevice(uint64_t* address, uint64_t value) {
  const std::atomic_ref<uint64_t> word(*address);
  for (uint64_t before = word; before < value && !word.compare_exchange_weak(before, value);) {
  }
}
inline uint64_t CompareAndSwapDevice(uint64_t* address, uint64_t expected, uint64_t value) {
  if (std::atomic_ref<uint64_t>(*address).compare_exchange_strong(expected, value) &&
      emulation::hooks.after_swap) {
    emulation::hooks.after_swap(address);
  }
  return expected;
}
inline uint64_t CompareAndSwapRelaxedDevice(uint64_t* address, uint64_t expected, uint64_t value) {
  std::atomic_ref<uint64_t>(*address).compare_exchange_strong(expected, value);
  return expected;
}
inline uint64_t OrRelaxedDevice(uint64_t* address, uint64_t bits, bool is_wanted) {
  return is_wanted ? std::atomic_ref<uint64_t>(*address).fetch_or(bits) : 0;
}
inline uint32_t IncrementRelaxedDevice(uint32_t* address, bool is_wanted) {
  return is_wanted ? std::atomic_ref<uint32_t>(*address).fetch_add(1) : 0;
}
inline uint32_t CompareAndSwapSystem(uint32_t* address, uint32_t expected, uint32_t value) {
  std::atomic_ref<uint32_t>(*address).compare_exchange_strong(expected, value);
  return expected;
}

inline uint4 LoadGlobalNoAllocate(const uint4* address) { return *address; }
inline int2 LoadGlobalNoAllocate(const int2* address) { return *address; }
inline int32_t LoadGlobalNoAllocate(const int32_t* address) { return *address; }
inline uint8_t LoadGlobalNoAllocate(const uint8_t* address) { return *address; }
inline float LoadGlobalNoAllocate(const float* address) { return *address; }

inline void LoadGlobal(const void* address, uint32_t (&words)[4]) {
  std::memcpy(words, address, sizeof words);
}
inline void PrefetchToL1(const void*) {}
inline void PrefetchToL2(const void*) {}

inline uint64_t GlobalTimer() { return emulation::Clock(); }

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_MEMORY_CUH_
