// Replaces ffi/device/ptx/cp_async.cuh: copies run at once, or when the thread waits for them.
// The first shows a destination that is overwritten too soon, the second one that is read too soon.
#ifndef JAX_EP_DEVICE_PTX_CP_ASYNC_CUH_
#define JAX_EP_DEVICE_PTX_CP_ASYNC_CUH_

#include <utility>

#include "ffi/device/common/integers.h"
#include "tests/cpp/emulation/ptx/mbarrier.cuh"
#include "tests/cpp/emulation/ptx/thread_groups.h"

namespace jax_ep {

struct EmulatedCopies : EmulatedGroups {
  static EmulatedCopies& OfThread() { return EmulatedOfThread<EmulatedCopies>(); }
};
template <int kBytes>
void CpAsync(uint32_t to, const void* from, bool valid) {
  if ((to | reinterpret_cast<uint64_t>(from)) % kBytes != 0) {
    emulation::Fail("an asynchronous copy of " + std::to_string(kBytes) + " bytes is not aligned");
  }
  uint8_t* const shared = SharedPointer(to);
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
inline void CpAsyncCommitGroup() { EmulatedCopies::OfThread().Commit(); }
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
  EmulatedCopies::OfThread().Run(kPending);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_CP_ASYNC_CUH_
