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
  // may continue. The deadline of progress starts when the peer has entered the call, and so has
  // the rank of this domain that forwards what a peer of another domain sends.
  //
  // `has_counts`: whether this rank has the counts of all ranks. A dispatch tells its partners its
  // counts before its domain has entered; until then only the partner itself is known to be there.
  __device__ Outcome Check(uint32_t peer, bool has_counts = true) {
    const Outcome aborted = FindAbort(call_);
    if (aborted != Outcome::kArrived) return aborted;
    const Domains& domains = layout_.domains;
    const int rank = call_.control->rank;
    const auto other = static_cast<int>(peer);
    const int here = domains.Domain(rank);
    const int there = domains.Domain(other);
    const int neighbor = there == here ? other : domains.Rank(here, domains.Index(other));
    auto outcome = Outcome::kArrived;
    bool has_entered = neighbor == rank || HasEntered(neighbor, &outcome);
    const uint32_t awaited = has_entered ? peer : static_cast<uint32_t>(neighbor);
    if (there != here && has_entered && outcome == Outcome::kArrived) {
      const Rail rail(call_, layout_, domains.Rail(here, there));
      const bool has_message = !__any_sync(kFullWarp, !rail.HasArrived(0));
      if (has_message) outcome = CheckPartner(call_, rail, 0, sequence_);
      has_entered = has_message && (has_counts || neighbor == rank);
    }
    if (outcome == Outcome::kArrived && !has_entered) outcome = FindLeaver(call_, sequence_);
    if (outcome != Outcome::kArrived) return outcome;
    if (has_entered) return progress_.Check(peer);
    progress_.Restart();
    return entry_.Check(awaited);
  }

 private:
  // Whether a rank of this domain has entered the call. If it is another call, aborts.
  __device__ bool HasEntered(int neighbor, Outcome* outcome) const {
    const EntryFlags& flags = call_.control->inbox->entry[sequence_ % 2][neighbor];
    if (__shfl_sync(kFullWarp, LoadAcquireSystem(&flags.sequence), 0) < sequence_) return false;
    if (ReadEntryFlags(call_, flags) == Outcome::kMismatch) {
      *outcome = Outcome::kMismatch;
      AbortGroup(call_, *outcome, WaitPoint::kEntry, neighbor, sequence_);
    }
    return true;
  }

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
