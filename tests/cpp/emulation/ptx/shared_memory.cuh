// Replaces ffi/device/ptx/shared_memory.cuh: addresses of shared memory are offsets. Those in a
// certain block of the cluster have one more than its rank in their upper 8 bits.
#ifndef JAX_EP_DEVICE_PTX_SHARED_MEMORY_CUH_
#define JAX_EP_DEVICE_PTX_SHARED_MEMORY_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

inline uint8_t* DynamicSharedMemory() { return emulation::SharedMemory(); }
inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - emulation::SharedMemory());
}

inline constexpr int kEmulatedRankShift = 24;
inline uint8_t* SharedPointer(uint32_t address) {
  const uint32_t block = address >> kEmulatedRankShift;
  return (block == 0 ? emulation::SharedMemory() : emulation::SharedMemory(block - 1)) +
         (address & (1u << kEmulatedRankShift) - 1);
}

inline uint4 LoadShared(uint32_t from) {
  uint4 chunk;
  std::memcpy(&chunk, SharedPointer(from), sizeof chunk);
  return chunk;
}
inline void LoadSharedPair(uint32_t from, uint32_t (&words)[2]) {
  std::memcpy(words, SharedPointer(from), sizeof words);
}
inline void LoadSharedPair(uint32_t from, float (&values)[2]) {
  std::memcpy(values, SharedPointer(from), sizeof values);
}
inline uint32_t LoadSharedByte(uint32_t from) { return *SharedPointer(from); }
inline void StoreShared(uint32_t to, uint4 vector) {
  std::memcpy(SharedPointer(to), &vector, sizeof vector);
}
inline void StoreShared(uint32_t to, const float* values) {
  std::memcpy(SharedPointer(to), values, 2 * sizeof *values);
}
inline void StoreShared(uint32_t to, uint32_t value) {
  std::memcpy(SharedPointer(to), &value, sizeof value);
}
inline void StoreShared(uint32_t to, float value) {
  std::memcpy(SharedPointer(to), &value, sizeof value);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_SHARED_MEMORY_CUH_
