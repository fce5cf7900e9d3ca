// Replaces ffi/device/ptx/mbarrier.cuh: the functions that the transfers use.
#ifndef JAX_EP_DEVICE_PTX_MBARRIER_CUH_
#define JAX_EP_DEVICE_PTX_MBARRIER_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Fits into the 8 bytes of an mbarrier.
struct EmulatedBarrier {
  int32_t bytes;  // expected and not yet copied
  uint8_t arrivals;
  uint8_t left;
  uint8_t parity;  // the current, incomplete phase's
  uint8_t unused;

  static EmulatedBarrier* At(uint32_t address) {
    return reinterpret_cast<EmulatedBarrier*>(emulation::SharedMemory() + address);
  }
  void Update() {
    if (left != 0 || bytes != 0) return;
    left = arrivals;
    parity ^= 1;
  }
};
static_assert(sizeof(EmulatedBarrier) == 8);

inline void MbarrierInit(uint32_t barrier, uint32_t arrivals) {
  const auto count = static_cast<uint8_t>(arrivals);
  *EmulatedBarrier::At(barrier) = {0, count, count, 0, 0};
}
inline void FenceMbarrierInit() {}
inline void MbarrierArriveExpectTx(uint32_t barrier, uint32_t bytes) {
  EmulatedBarrier* const b = EmulatedBarrier::At(barrier);
  b->bytes += static_cast<int32_t>(bytes);
  --b->left;
  b->Update();
}
inline void MbarrierWait(uint32_t barrier, uint32_t parity) {
  while (EmulatedBarrier::At(barrier)->parity == parity) emulation::Yield();
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_MBARRIER_CUH_
