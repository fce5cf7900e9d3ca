// Gives out parts of NVSHMEM's heap, which all processes allocate once and together.
#ifndef JAX_EP_RUNTIME_NETWORK_NVSHMEM_HEAP_H_
#define JAX_EP_RUNTIME_NETWORK_NVSHMEM_HEAP_H_

#include <cstddef>
#include <cstdint>
#include <map>

namespace jax_ep {

// Used by one thread at a time. Processes give out parts in orders of their own: partners tell each
// other where theirs are.
class NvshmemHeap {
 public:
  static constexpr uint64_t kAlignment = 4096;

  NvshmemHeap() = default;
  NvshmemHeap(uint64_t base, uint64_t bytes) : base_(base), bytes_(bytes) {}

  // Returns the address of a part, or 0 if there is no room.
  uint64_t Allocate(uint64_t bytes);
  void Free(uint64_t address) { used_.erase(address); }

  uint64_t base() const { return base_; }
  uint64_t bytes() const { return bytes_; }
  uint64_t used_bytes() const;

 private:
  uint64_t base_ = 0;
  uint64_t bytes_ = 0;
  std::map<uint64_t, uint64_t> used_;  // the end of each part, indexed by its address
};

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_NETWORK_NVSHMEM_HEAP_H_
