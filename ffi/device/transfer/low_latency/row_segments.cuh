// Pieces of rows in small calls: copying them, their flags, and waiting for them.
#ifndef JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_ROW_SEGMENTS_CUH_
#define JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_ROW_SEGMENTS_CUH_

#include "ffi/device/transfer/eager_buffer.cuh"

namespace jax_ep {

// A piece of a row on its way through the registers of a warp, which asks for all of it at once.
class SegmentCopy {
 public:
  // Of no chunks at all if row_vectors is 0.
  __device__ SegmentCopy(const RowSegments& pieces, int piece, int row_vectors)
      : first_(pieces.FirstOf(piece) + static_cast<int>(threadIdx.x % 32)),
        end_(pieces.EndOf(piece, row_vectors)) {}

  __device__ void Load(const uint4* row) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first_ + 32 * i < end_) chunks_[i] = LoadGlobalNoAllocate(&row[first_ + 32 * i]);
    }
  }

  __device__ void Store(uint4* row) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first_ + 32 * i < end_) row[first_ + 32 * i] = chunks_[i];
    }
  }

 private:
  static constexpr int kLoads = kMaxSegmentVectors / 32;

  const int first_;  // of this lane
  const int end_;
  uint4 chunks_[kLoads];
};

// The flags of the pieces that a warp has stored, kept back for some pieces: a release waits until
// all stores before it have arrived, and the next pieces' need not wait for that.
class SegmentFlags {
 public:
  __device__ explicit SegmentFlags(const EagerBuffers& halves) : halves_(halves) {}

  // The piece is stored.
  __device__ void Add(uint64_t* flag) {
    if (static_cast<int>(threadIdx.x % 32) == count_) flag_ = flag;
    if (++count_ == 32) Signal();
  }

  __device__ void Signal() {
    __syncwarp();  // all lanes' stores come before each lane's flag
    // SIGNAL_SEGMENT
    if (flag_ != nullptr) StoreReleaseSystem(flag_, halves_.tag());
    flag_ = nullptr;
    count_ = 0;
  }

 private:
  const EagerBuffers& halves_;
  uint64_t* flag_ = nullptr;
  int count_ = 0;
};

// A wait for pieces that did not come at once.
class SegmentWait {
 public:
  __device__ SegmentWait(const Call& call, uint64_t sequence)
      : call_(call),
        sequence_(sequence),
        entry_(call, WaitPoint::kEntry, sequence),
        progress_(call, WaitPoint::kChunk, sequence) {}

  // Whether it may go on for one of `peer`; kArrived if so. Only who has entered the call has to
  // hurry. By one whole warp; all lanes return the same.
  __device__ Outcome Try(uint32_t peer) {
    ControlBlock* const control = call_.control;
    const uint32_t aborted = __shfl_sync(kFullWarp, LoadAcquireSystem(&control->abort), 0);
    if (aborted != 0) {
      ForwardAbort(call_, aborted);
      return static_cast<Outcome>(aborted);
    }
    // Another warp of this rank knows that they will not come.
    const uint32_t failed =
        __shfl_sync(kFullWarp, LoadAcquireDevice(&control->progress.failure), 0);
    if (failed != 0) return static_cast<Outcome>(failed);
    if (peer == static_cast<uint32_t>(control->rank)) return progress_.Try(peer);
    const EntryFlags& line = control->entry[sequence_ % 2][peer];
    if (__shfl_sync(kFullWarp, LoadAcquireSystem(&line.sequence), 0) < sequence_) {
      progress_.Restart();
      return entry_.Try(peer);
    }
    // It may be in another call, or have nothing to send.
    const Outcome outcome = ReadEntryFlags(call_, line);
    if (outcome == Outcome::kMismatch) {
      AbortGroup(call_, outcome, WaitPoint::kEntry, static_cast<int>(peer), sequence_);
    }
    return outcome == Outcome::kArrived ? progress_.Try(peer) : outcome;
  }

 private:
  const Call& call_;
  const uint64_t sequence_;
  Deadline entry_;
  Deadline progress_;
};

// Waits until no lane misses a piece: `missing()` looks, and returns whose it is, kMaxRanks if
// there is none. By one whole warp; all lanes return the same, and what each has acquired happens
// before what any does next.
template <typename Missing>
__device__ inline Outcome WaitForSegments(const Call& call, uint64_t sequence, Missing missing) {
  constexpr int kLooks = 16;  // in a row, before anything else is looked at
  SegmentWait wait(call, sequence);
  while (true) {
    uint32_t peer = kMaxRanks;
#pragma unroll 1
    for (int look = 0; look < kLooks; ++look) {
      peer = __reduce_min_sync(kFullWarp, missing());
      if (peer == kMaxRanks) break;
    }
    __syncwarp();
    // Pieces that are here are right, whatever became of their owner: they are no operands.
    if (peer == kMaxRanks) return Outcome::kArrived;
    const Outcome end = wait.Try(peer);
    if (end == Outcome::kArrived) continue;
    if (threadIdx.x % 32 == 0) RecordFailure(call, end);
    return end;
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_ROW_SEGMENTS_CUH_
