// The deadline of a wait. A wait for entry and a wait for progress have deadlines of their own.
#ifndef JAX_EP_DEVICE_PROTOCOL_DEADLINE_CUH_
#define JAX_EP_DEVICE_PROTOCOL_DEADLINE_CUH_

#include "ffi/device/protocol/abort.cuh"

namespace jax_ep {

// Used by one whole warp.
class Deadline {
 public:
  __device__ Deadline(const CallParams& call, WaitPoint wait_point, uint64_t sequence)
      : call_(call), wait_point_(wait_point), sequence_(sequence) {
    Restart();
  }
  __device__ void Restart() { start_ = GlobalTimer(); }

  // Called between two polls for `peer`; all lanes return the same. Returns kArrived if the wait
  // may continue. Warns the host once if it takes long, and aborts the group at the deadline.
  __device__ Outcome Check(uint32_t peer) {
    const ControlBlock* const control = call_.control;
    const uint64_t limit = wait_point_ == WaitPoint::kEntry ? control->entry_deadline_ns
                                                            : control->progress_deadline_ns;
    // Signed: the timer may step back, and then less than no time has passed.
    const auto passed = static_cast<int64_t>(GlobalTimer() - start_);
    const auto waited = static_cast<uint64_t>(__shfl_sync(kFullWarp, Max(passed, int64_t{0}), 0));
    if (waited > limit) {
      AbortGroup(call_, Outcome::kTimeout, wait_point_, static_cast<int>(peer), sequence_);
      return Outcome::kTimeout;
    }
    if (waited > control->warning_ns && !has_warned_ && LaneIndex() == 0) {
      has_warned_ = WarnHost(call_, wait_point_, static_cast<int>(peer), sequence_);
    }
    return Outcome::kArrived;
  }

 private:
  const CallParams& call_;
  const WaitPoint wait_point_;
  const uint64_t sequence_;
  uint64_t start_;
  bool has_warned_ = false;  // in the first lane
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_DEADLINE_CUH_
