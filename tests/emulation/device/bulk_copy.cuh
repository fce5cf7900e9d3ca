// In the place of ffi/device/bulk_copy.cuh: copies are made some time later.
#ifndef JAX_EP_DEVICE_BULK_COPY_CUH_
#define JAX_EP_DEVICE_BULK_COPY_CUH_

#include <cstdio>
#include <cstdlib>

#include "tests/emulation/device/mbarrier.cuh"

namespace jax_ep {

inline void CheckBulk(uint64_t a, uint64_t b, uint32_t bytes) {
  if ((a | b | bytes) % 16 == 0 && bytes > 0) return;
  std::printf("FAIL a bulk copy of %u bytes is not of multiples of 16\n", bytes);
  std::_Exit(1);
}

inline void BulkLoad(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  CheckBulk(to, reinterpret_cast<uint64_t>(from), bytes);
  uint8_t* const shared = emulation::SharedMemory();
  emulation::RunLater([=] {
    std::memcpy(shared + to, from, bytes);
    auto* const state = reinterpret_cast<EmulatedBarrier*>(shared + barrier);
    state->bytes -= static_cast<int32_t>(bytes);
    state->Update();
  });
}

inline void BulkStore(void* to, uint32_t from, uint32_t bytes) {
  CheckBulk(reinterpret_cast<uint64_t>(to), from, bytes);
  const uint8_t* const shared = emulation::SharedMemory();
  EmulatedStores::OfThread().open.push_back([=] { std::memcpy(to, shared + from, bytes); });
}

inline void FenceProxy() {}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_BULK_COPY_CUH_
