// Row segments of low-latency calls: copies, flags, and waits.
#ifndef JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_ROW_SEGMENTS_CUH_
#define JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_ROW_SEGMENTS_CUH_

#include "ffi/device/protocol/wait.cuh"
#include "ffi/device/protocol/work_items.cuh"
#include "ffi/device/transfer/dispatch/row_source.cuh"
#include "ffi/device/transfer/eager_buffers.cuh"
#include "ffi/device/transfer/low_latency/layout.h"

namespace jax_ep {

// Copies a segment through the registers of a warp, with all of its loads in flight at once. Its
// scales are two words per lane at most.
class SegmentCopy {
 public:
  // Copies nothing if both sizes are 0.
  __device__ SegmentCopy(const RowSegments& segments, int segment, int payload_vectors,
                         int num_scale_words)
      : first_(segments.First(segment) + LaneIndex()),
        end_(segments.End(segment, payload_vectors)),
        word_(segments.FirstScaleWord(segment) + LaneIndex()),
        end_word_(segments.EndScaleWord(segment, num_scale_words)) {}

  __device__ void Load(const CallParams& call, const RowSource& from) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first_ + 32 * i < end_) {
        vectors_[i] = LoadGlobalNoAllocate(&from.payload[first_ + 32 * i]);
      }
    }
    if (word_ >= end_word_) return;
    const ScaleSource scales = from.Scales(call);
    words_[0] = scales.Load(word_);
    if (word_ + 32 < end_word_) words_[1] = scales.Load(word_ + 32);
  }

  __device__ void Store(PeerPointer<uint4> payload, const ScaleDestination& scales) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first_ + 32 * i < end_) StoreToPeer(payload + (first_ + 32 * i), vectors_[i]);
    }
    if (word_ >= end_word_) return;
    scales.Store(word_, words_[0]);
    if (word_ + 32 < end_word_) scales.Store(word_ + 32, words_[1]);
  }

 private:
  static constexpr int kLoads = kMaxSegmentVectors / 32;
  static_assert(kMaxSegmentScaleWords == 2 * 32);

  const int first_;  // this lane's first vector
  const int end_;
  const int word_;  // this lane's first word of the scales
  const int end_word_;
  uint4 vectors_[kLoads];
  int32_t words_[2];
};

// The flags of the segments that a warp has stored. They are delayed for some segments, because a
// release waits for all earlier stores, and the stores of the next segments should not wait for
// that.
class SegmentFlags {
 public:
  template <typename Eager>
  __device__ explicit SegmentFlags(const Eager& eager) : tag_(eager.tag()) {}

  // Adds the flag of a stored segment.
  __device__ void Add(PeerPointer<uint64_t> flag) {
    if (LaneIndex() == count_) flag_ = flag;
    if (++count_ == 32) Signal();
  }

  __device__ void Signal() {
    __syncwarp();  // all lanes' stores come before each lane's flag
    if (flag_) SignalSegment(flag_, tag_);
    flag_ = PeerPointer<uint64_t>(nullptr);
    count_ = 0;
  }

 private:
  const uint64_t tag_;
  PeerPointer<uint64_t> flag_{nullptr};
  int count_ = 0;
};

// Requests that a sending warp makes first. They are made while the block claims the call, so that
// the latencies overlap.
struct SenderStart {
  __device__ SenderStart(const CallParams& call, bool is_sender)
      : tickets(&call.control->progress.low_latency_tickets, is_sender) {
    LoadAbortWord(call);
  }

  // Called again if the claim met the host: each generation has an inbox of its own.
  __device__ void LoadAbortWord(const CallParams& call) {
    abort_word = LoadRelaxedSystem(&call.control->inbox->abort);
  }

  // Called by one whole warp; all lanes return the same, as jax_ep::MayStoreToPeers.
  __device__ bool MayStoreToPeers() const { return __shfl_sync(kFullWarp, abort_word, 0) == 0; }

  WarpTicketPrefetch tickets;
  uint32_t abort_word;
};

// A wait for segments that did not arrive at once.
class SegmentWait {
 public:
  __device__ SegmentWait(const CallParams& call, uint64_t sequence)
      : call_(call),
        sequence_(sequence),
        entry_(call, WaitPoint::kEntry, sequence),
        progress_(call, WaitPoint::kChunk, sequence) {}

  // Called by one whole warp; all lanes return the same. Returns kArrived if the wait for `peer`
  // may continue. The deadline of progress starts when the peer has entered the call.
  __device__ Outcome Check(uint32_t peer) {
    const ControlBlock* const control = call_.control;
    const uint32_t aborted = __shfl_sync(kFullWarp, LoadAcquireSystem(&control->inbox->abort), 0);
    if (aborted != 0) {
      ForwardAbort(call_, aborted);
      return static_cast<Outcome>(aborted);
    }
    // Another warp of this rank has recorded a failure.
    const uint32_t failed =
        __shfl_sync(kFullWarp, LoadAcquireDevice(&control->progress.failure), 0);
    if (failed != 0) return static_cast<Outcome>(failed);
    if (peer == static_cast<uint32_t>(control->rank)) return progress_.Check(peer);
    const EntryFlags& flags = control->inbox->entry[sequence_ % 2][peer];
    if (__shfl_sync(kFullWarp, LoadAcquireSystem(&flags.sequence), 0) < sequence_) {
      progress_.Restart();
      return entry_.Check(peer);
    }
    // The peer may run another call, or have a poisoned plan.
    const Outcome outcome = ReadEntryFlags(call_, flags);
    if (outcome == Outcome::kMismatch) {
      AbortGroup(call_, outcome, WaitPoint::kEntry, static_cast<int>(peer), sequence_);
    }
    return outcome == Outcome::kArrived ? progress_.Check(peer) : outcome;
  }

 private:
  const CallParams& call_;
  const uint64_t sequence_;
  Deadline entry_;
  Deadline progress_;
};

// Called by one whole warp; all lanes return the same. Waits until no lane misses a segment:
// missing() polls, and returns the peer whose segment is missing, or kMaxRanks. What each lane has
// acquired happens before what any lane does next. `wait` is a SegmentWait, or like it.
template <typename Wait, typename Missing>
__device__ inline Outcome WaitForSegments(const CallParams& call, Wait wait, Missing missing) {
  const ProfileSpan span(SpanKind::kWaitSegment);
  constexpr int kPolls = 16;  // before deadlines and the abort word are checked
  while (true) {
    uint32_t peer = kMaxRanks;
#pragma unroll 1
    for (int poll = 0; poll < kPolls; ++poll) {
      peer = __reduce_min_sync(kFullWarp, missing());
      if (peer == kMaxRanks) break;
    }
    __syncwarp();
    // Segments that have arrived are valid even if their sender has failed since: they are copies
    // in this rank's memory, not the sender's operands.
    if (peer == kMaxRanks) return Outcome::kArrived;
    const Outcome end = wait.Check(peer);
    if (end == Outcome::kArrived) continue;
    if (LaneIndex() == 0) RecordFailure(call, end);
    return end;
  }
}
template <typename Missing>
__device__ inline Outcome WaitForSegments(const CallParams& call, uint64_t sequence,
                                          Missing missing) {
  return WaitForSegments(call, SegmentWait(call, sequence), missing);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_ROW_SEGMENTS_CUH_
