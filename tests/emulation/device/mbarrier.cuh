// In the place of ffi/device/mbarrier.cuh: what the transfers use of it.
#ifndef JAX_EP_DEVICE_MBARRIER_CUH_
#define JAX_EP_DEVICE_MBARRIER_CUH_

#include <utility>
#include <vector>

#include "ffi/device/integers.h"

namespace jax_ep {

// In the 8 bytes that a barrier has.
struct EmulatedBarrier {
  int32_t bytes;  // expected and not yet copied
  uint8_t arrivals;
  uint8_t left;
  uint8_t parity;  // of the phase that is not complete
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

inline void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  const auto count = static_cast<uint8_t>(arrivals);
  *EmulatedBarrier::At(barrier) = {0, count, count, 0, 0};
}
inline void FenceBarrierInit() {}
inline void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  EmulatedBarrier* const b = EmulatedBarrier::At(barrier);
  b->bytes += static_cast<int32_t>(bytes);
  --b->left;
  b->Update();
}
inline void WaitBarrier(uint32_t barrier, uint32_t parity) {
  while (EmulatedBarrier::At(barrier)->parity == parity) emulation::Yield();
}

inline void NamedBarrier(int number, int threads) {
  emulation::BarrierOfSome(number, static_cast<unsigned>(threads));
}

// A thread's batches of stores. Each is carried out at once, whenever; it counts when all before it
// have been, too.
struct EmulatedStores {
  std::vector<std::function<void()>> open;
  std::vector<bool> has_run;  // by batch
  size_t done = 0;

  static EmulatedStores& OfThread() {
    static thread_local EmulatedStores stores[1024];
    return stores[threadIdx.x];
  }
};
inline void CommitStores() {
  EmulatedStores* const stores = &EmulatedStores::OfThread();
  const size_t batch = stores->has_run.size();
  stores->has_run.push_back(false);
  emulation::RunLater([stores, batch, copies = std::exchange(stores->open, {})] {
    for (const auto& copy : copies) copy();
    stores->has_run[batch] = true;
    while (stores->done < stores->has_run.size() && stores->has_run[stores->done]) ++stores->done;
  });
}
template <int kPending>
void WaitStoresRead() {
  const EmulatedStores& stores = EmulatedStores::OfThread();
  while (stores.has_run.size() - stores.done > kPending) emulation::Yield();
}
template <int kPending>
void WaitStores() {
  WaitStoresRead<kPending>();
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MBARRIER_CUH_
