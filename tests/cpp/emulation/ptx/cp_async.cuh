// Replaces ffi/device/ptx/cp_async.cuh: copies run at once, or when the thread waits for them.
// The first shows a destination that is overwritten too soon, the second one that is read too soon.
#ifndef JAX_EP_DEVICE_PTX_CP_ASYNC_CUH_
#define JAX_EP_DEVICE_PTX_CP_ASYNC_CUH_

#include <deque>
#include <utility>
#include <vector>

#include "ffi/device/common/integers.h"
#include "tests/cpp/emulation/ptx/mbarrier.cuh"

namespace jax_ep {

// A thread's groups of copies, the open one last.
struct EmulatedCopies {
  std::vector<std::function<void()>> open;
  std::deque<std::vector<std::function<void()>>> batches;

  static EmulatedCopies& OfThread() {
    static thread_local EmulatedCopies copies[emulation::kMaxFibers];
    return copies[emulation::Here().number];
  }
};
template <int kBytes>
void CpAsync(uint32_t to, const void* from, bool valid) {
  if ((to | reinterpret_cast<uint64_t>(from)) % kBytes != 0) {
    emulation::Fail("an asynchronous copy of " + std::to_string(kBytes) + " bytes is not aligned");
  }
  uint8_t* const shared = emulation::SharedMemory() + to;
  const auto copy = [=] {
    if (valid) {
      std::memcpy(shared, from, kBytes);
    } else {
      std::memset(shared, 0, kBytes);
    }
  };
  EmulatedCopies& copies = EmulatedCopies::OfThread();
  if (emulation::Random() % 2 == 0) return copy();
  copies.open.push_back(copy);
}
inline void CpAsyncCommitGroup() {
  EmulatedCopies& copies = EmulatedCopies::OfThread();
  copies.batches.push_back(std::exchange(copies.open, {}));
}
// The open copies run before it arrives, at some later time.
inline void CpAsyncMbarrierArrive(uint32_t barrier) {
  EmulatedBarrier* const complete = EmulatedBarrier::At(barrier);
  const auto finish = [complete, copies = std::exchange(EmulatedCopies::OfThread().open, {})] {
    for (const auto& copy : copies) copy();
    complete->Arrive();
  };
  if (emulation::Random() % 2 == 0) return finish();
  emulation::RunLater(finish);
}
template <int kPending>
void CpAsyncWaitGroup() {
  auto& batches = EmulatedCopies::OfThread().batches;
  for (; batches.size() > kPending; batches.pop_front()) {
    for (const auto& copy : batches.front()) copy();
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_CP_ASYNC_CUH_
