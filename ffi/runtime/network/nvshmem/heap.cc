#include "ffi/runtime/network/nvshmem/heap.h"

namespace jax_ep {

uint64_t NvshmemHeap::Allocate(uint64_t bytes) {
  if (bytes == 0 || bytes > bytes_) return 0;
  const uint64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  uint64_t begin = base_;  // begins the first gap that is large enough
  for (const auto& [address, end] : used_) {
    if (address - begin >= rounded) break;
    begin = end;
  }
  if (base_ + bytes_ - begin < rounded) return 0;
  used_[begin] = begin + rounded;
  return begin;
}

uint64_t NvshmemHeap::used_bytes() const {
  uint64_t sum = 0;
  for (const auto& [address, end] : used_) sum += end - address;
  return sum;
}

}  // namespace jax_ep
