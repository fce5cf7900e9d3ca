// The eager buffers of a group with domains, and the waits of low-latency calls for what arrives in
// them, and for messages of rails.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_WAITS_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_WAITS_CUH_

#include "ffi/device/transfer/eager_buffers.cuh"
#include "ffi/device/transfer/hierarchical/domain.cuh"
#include "ffi/device/transfer/hierarchical/low_latency/layout.h"
#include "ffi/device/transfer/hierarchical/rail.cuh"
#include "ffi/device/transfer/low_latency/row_segments.cuh"

namespace jax_ep {

// Where the eager buffers are in each rank's workspace (layout.h).
class DomainEagerLayout {
 public:
  __device__ DomainEagerLayout(const CallParams& call, int64_t offset)
      : offset_(offset), num_ranks_(call.num_ranks) {}

  __device__ int64_t rows(int64_t parity) const {
    return offset_ + parity * num_ranks_ * kDomainEagerBytes;
  }
  __device__ int64_t counts(int64_t parity) const {
    return rows(parity) + num_ranks_ * kDomainEagerRowBytes;
  }
  __device__ int64_t packets(int64_t parity) const {
    return counts(parity) + num_ranks_ * kDomainEagerCountBytes;
  }
  __device__ int64_t flags(int64_t parity) const {
    return packets(parity) + num_ranks_ * kDomainEagerPacketBytes;
  }

 private:
  const int64_t offset_;
  const int64_t num_ranks_;
};
using DomainEagerBuffers = EagerBuffersOf<DomainEagerLayout>;

// As SegmentWait, of one level: a wait for what did not arrive at once.
class DomainSegmentWait {
 public:
  __device__ DomainSegmentWait(const CallParams& call, const HierarchicalLayout& layout,
                               uint64_t sequence)
      : call_(call),
        layout_(layout),
        sequence_(sequence),
        entry_(call, WaitPoint::kEntry, sequence),
        progress_(call, WaitPoint::kChunk, sequence) {}

  // Called by one whole warp; all lanes return the same. Returns kArrived if the wait for `peer`
  // may continue. The deadline of progress starts when the peer, or this rank's partner in its
  // domain, has entered the call.
  __device__ Outcome Check(uint32_t peer) {
    const ControlBlock* const control = call_.control;
    const Outcome aborted = FindAbort(call_);
    if (aborted != Outcome::kArrived) return aborted;
    const int rank = control->rank;
    const auto other = static_cast<int>(peer);
    if (other == rank) return progress_.Check(peer);
    const int here = layout_.domains.Domain(rank);
    const int there = layout_.domains.Domain(other);
    bool has_entered;
    auto outcome = Outcome::kArrived;
    if (there == here) {
      const EntryFlags& flags = control->inbox->entry[sequence_ % 2][other];
      has_entered = __shfl_sync(kFullWarp, LoadAcquireSystem(&flags.sequence), 0) >= sequence_;
      if (has_entered && ReadEntryFlags(call_, flags) == Outcome::kMismatch) {
        outcome = Outcome::kMismatch;
        AbortGroup(call_, outcome, WaitPoint::kEntry, other, sequence_);
      }
    } else {
      const Rail rail(call_, layout_, layout_.domains.Rail(here, there));
      has_entered = !__any_sync(kFullWarp, !rail.HasArrived(0));
      if (has_entered) outcome = CheckPartner(call_, rail, 0, sequence_);
    }
    if (outcome == Outcome::kArrived && !has_entered) outcome = FindLeaver(call_, sequence_);
    if (outcome != Outcome::kArrived) return outcome;
    if (has_entered) return progress_.Check(peer);
    progress_.Restart();
    return entry_.Check(peer);
  }

 private:
  const CallParams& call_;
  const HierarchicalLayout& layout_;
  const uint64_t sequence_;
  Deadline entry_;
  Deadline progress_;
};

// Called by one warp, as WaitForSegments.
template <typename Missing>
__device__ inline Outcome WaitForSegments(const CallParams& call, const HierarchicalLayout& layout,
                                          uint64_t sequence, Missing missing) {
  return WaitForSegments(call, DomainSegmentWait(call, layout, sequence), missing);
}

// Called by one warp, as WaitForSegments. Waits until the slot of a message is free.
// EAGER_WAIT_CREDIT
__device__ inline Outcome WaitForCredit(const CallParams& call, const HierarchicalLayout& layout,
                                        uint64_t sequence, const Rail& rail, int message) {
  return WaitForSegments(call, layout, sequence, [&] {
    return static_cast<uint32_t>(rail.MayPack(message) ? kMaxRanks : rail.partner());
  });
}

// Called by one warp, as WaitForSegments. Waits until the slots of all rails' metadata are free.
__device__ inline Outcome WaitForAllCredits(const CallParams& call,
                                            const HierarchicalLayout& layout, uint64_t sequence) {
  return WaitForSegments(call, layout, sequence, [&] {
    uint32_t missing = kMaxRanks;
    if (LaneIndex() < layout.domains.num_rails()) {
      const Rail rail(call, layout, LaneIndex());
      if (!rail.MayPack(0)) missing = rail.partner();
    }
    return missing;
  });
}

// Called by one warp, as WaitForSegments. Waits until a message has arrived.
// EAGER_WAIT_MESSAGE
__device__ inline Outcome WaitForMessage(const CallParams& call, const HierarchicalLayout& layout,
                                         uint64_t sequence, const Rail& rail, int message) {
  return WaitForSegments(call, layout, sequence, [&] {
    return static_cast<uint32_t>(rail.HasArrived(message) ? kMaxRanks : rail.partner());
  });
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_WAITS_CUH_
