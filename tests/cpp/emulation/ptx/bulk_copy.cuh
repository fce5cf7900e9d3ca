// Replaces ffi/device/ptx/bulk_copy.cuh: copies run at some later time.
#ifndef JAX_EP_DEVICE_PTX_BULK_COPY_CUH_
#define JAX_EP_DEVICE_PTX_BULK_COPY_CUH_

#include <utility>
#include <vector>

#include "tests/cpp/emulation/ptx/mbarrier.cuh"
#include "tests/cpp/emulation/ptx/thread_groups.h"

namespace jax_ep {

// A thread's bulk groups of stores. Each runs at any time, as a whole. It is complete when it and
// all groups before it have run.
struct EmulatedStores {
  std::vector<std::function<void()>> open;
  std::vector<bool> has_run;  // indexed by group
  uint64_t done = 0;

  static EmulatedStores& OfThread() { return EmulatedOfThread<EmulatedStores>(); }
};
inline void BulkCommitGroup() {
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
void BulkWaitGroupRead() {
  const EmulatedStores& stores = EmulatedStores::OfThread();
  while (stores.has_run.size() - stores.done > kPending) {
    emulation::AwaitChange(&stores.done, stores.done);
  }
}
template <int kPending>
void BulkWaitGroup() {
  BulkWaitGroupRead<kPending>();
}

inline void CheckBulk(uint64_t a, uint64_t b, uint32_t bytes) {
  if ((a | b | bytes) % 16 == 0 && bytes > 0) return;
  emulation::Fail("a bulk copy of " + std::to_string(bytes) + " bytes is not of multiples of 16");
}

inline void BulkLoad(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  CheckBulk(to, reinterpret_cast<uint64_t>(from), bytes);
  uint8_t* const shared = SharedPointer(to);
  EmulatedBarrier* const complete = EmulatedBarrier::At(barrier);
  emulation::RunLater([=] {
    std::memcpy(shared, from, bytes);
    complete->Complete(static_cast<int32_t>(bytes));
  });
}

inline void BulkStore(void* to, uint32_t from, uint32_t bytes) {
  CheckBulk(reinterpret_cast<uint64_t>(to), from, bytes);
  const uint8_t* const shared = SharedPointer(from);
  EmulatedStores::OfThread().open.push_back([=] { std::memcpy(to, shared, bytes); });
}

inline void FenceProxyAsync() {}
inline void FenceProxyAsyncShared() {}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_BULK_COPY_CUH_
