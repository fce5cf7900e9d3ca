// Replaces ffi/device/ptx/mbarrier.cuh.
#ifndef JAX_EP_DEVICE_PTX_MBARRIER_CUH_
#define JAX_EP_DEVICE_PTX_MBARRIER_CUH_

#include "ffi/device/common/integers.h"
#include "tests/cpp/emulation/ptx/shared_memory.cuh"

namespace jax_ep {

// Fits into the 8 bytes of an mbarrier.
struct EmulatedBarrier {
  int32_t bytes;        // expected and not yet copied
  uint32_t parity : 1;  // the current, incomplete phase's
  uint32_t arrivals : 15;
  uint32_t left : 16;

  static EmulatedBarrier* At(uint32_t address) {
    return reinterpret_cast<EmulatedBarrier*>(SharedPointer(address));
  }
  void Arrive() {
    if (left == 0) emulation::Fail("an mbarrier has more arrivals than it expects");
    --left;
    Update();
  }
  void Complete(int32_t copied) {
    bytes -= copied;
    Update();
  }

 private:
  void Update() {
    if (left != 0 || bytes != 0) return;
    left = arrivals;
    parity ^= 1;
  }
};
static_assert(sizeof(EmulatedBarrier) == 8);

inline void MbarrierInit(uint32_t barrier, uint32_t arrivals) {
  *EmulatedBarrier::At(barrier) = {0, 0, arrivals, arrivals};
}
inline void FenceMbarrierInit() {}
inline void MbarrierArrive(uint32_t barrier) { EmulatedBarrier::At(barrier)->Arrive(); }
inline void MbarrierArriveExpectTx(uint32_t barrier, uint32_t bytes) {
  EmulatedBarrier* const b = EmulatedBarrier::At(barrier);
  b->bytes += static_cast<int32_t>(bytes);
  b->Arrive();
}
inline void MbarrierWait(uint32_t barrier, uint32_t parity) {
  const EmulatedBarrier* const b = EmulatedBarrier::At(barrier);
  const auto* const word = reinterpret_cast<const uint64_t*>(b);
  while (b->parity == parity) emulation::AwaitChange(word, *word);
}
inline bool MbarrierTestWait(uint32_t barrier, uint32_t parity) {
  return EmulatedBarrier::At(barrier)->parity != parity && emulation::Random() % 4 != 0;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_MBARRIER_CUH_
