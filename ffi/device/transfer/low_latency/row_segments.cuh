// Pieces of rows in small calls: copying them, their flags, and waiting for them.
#ifndef JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_ROW_SEGMENTS_CUH_
#define JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_ROW_SEGMENTS_CUH_

#include "ffi/device/transfer/eager_buffer.cuh"

namespace jax_ep {

// A piece of a row on its way through the registers of a warp, which asks for all of it at once.
class PieceCopy {
 public:
  // Of no chunks at all if row_chunks is 0.
  __device__ PieceCopy(const SmallPieces& pieces, int piece, int row_chunks)
      : first_(pieces.FirstOf(piece) + static_cast<int>(threadIdx.x % 32)),
        end_(pieces.EndOf(piece, row_chunks)) {}

  __device__ void Load(const uint4* row) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first_ + 32 * i < end_) chunks_[i] = LoadShared16(&row[first_ + 32 * i]);
    }
  }

  __device__ void Store(uint4* row) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (first_ + 32 * i < end_) row[first_ + 32 * i] = chunks_[i];
    }
  }

 private:
  static constexpr int kLoads = kSmallPieceChunks / 32;

  const int first_;  // of this lane
  const int end_;
  uint4 chunks_[kLoads];
};

// The flags of the pieces that a warp has stored, kept back for some pieces: a release waits until
// all stores before it have arrived, and the next pieces' need not wait for that.
class PieceFlags {
 public:
  __device__ explicit PieceFlags(const Halves& halves) : halves_(halves) {}

  // The piece is stored.
  __device__ void Add(uint64_t* flag) {
    if (static_cast<int>(threadIdx.x % 32) == count_) flag_ = flag;
    if (++count_ == 32) Signal();
  }

  __device__ void Signal() {
    __syncwarp();  // all lanes' stores come before each lane's flag
    // SIGNAL_PIECE
    if (flag_ != nullptr) StoreReleaseSystem(flag_, halves_.tag());
    flag_ = nullptr;
    count_ = 0;
  }

 private:
  const Halves& halves_;
  uint64_t* flag_ = nullptr;
  int count_ = 0;
};

// A wait for pieces that did not come at once.
class PieceWait {
 public:
  __device__ PieceWait(const Call& call, uint64_t epoch)
      : call_(call),
        epoch_(epoch),
        entry_(call, Gate::kReady, epoch),
        progress_(call, Gate::kChunk, epoch) {}

  // Whether it may go on for one of `peer`; kArrived if so. Only who has entered the call has to
  // hurry. By one whole warp; all lanes return the same.
  __device__ Outcome Try(uint32_t peer) {
    ControlBlock* const control = call_.control;
    const uint32_t aborted = __shfl_sync(kWholeWarp, LoadAcquireSystem(&control->abort), 0);
    if (aborted != 0) {
      PassOnAbort(call_, aborted);
      return static_cast<Outcome>(aborted);
    }
    // Another warp of this rank knows that they will not come.
    const uint32_t failed =
        __shfl_sync(kWholeWarp, LoadAcquireDevice(&control->progress.failure), 0);
    if (failed != 0) return static_cast<Outcome>(failed);
    if (peer == static_cast<uint32_t>(control->rank)) return progress_.Try(peer);
    const FlagLine& line = control->ready[epoch_ % 2][peer];
    if (__shfl_sync(kWholeWarp, LoadAcquireSystem(&line.epoch), 0) < epoch_) {
      progress_.Restart();
      return entry_.Try(peer);
    }
    // It may be in another call, or have nothing to send.
    const Outcome outcome = ReadLine(call_, line);
    if (outcome == Outcome::kMismatch) {
      AbortGroup(call_, outcome, Gate::kReady, static_cast<int>(peer), epoch_);
    }
    return outcome == Outcome::kArrived ? progress_.Try(peer) : outcome;
  }

 private:
  const Call& call_;
  const uint64_t epoch_;
  Patience entry_;
  Patience progress_;
};

// Waits until no lane misses a piece: `missing()` looks, and returns whose it is, kMaxPeers if
// there is none. By one whole warp; all lanes return the same, and what each has acquired happens
// before what any does next.
template <typename Missing>
__device__ inline Outcome WaitForPieces(const Call& call, uint64_t epoch, Missing missing) {
  constexpr int kLooks = 16;  // in a row, before anything else is looked at
  PieceWait wait(call, epoch);
  while (true) {
    uint32_t peer = kMaxPeers;
#pragma unroll 1
    for (int look = 0; look < kLooks; ++look) {
      peer = __reduce_min_sync(kWholeWarp, missing());
      if (peer == kMaxPeers) break;
    }
    __syncwarp();
    // Pieces that are here are right, whatever became of their owner: they are no operands.
    if (peer == kMaxPeers) return Outcome::kArrived;
    const Outcome end = wait.Try(peer);
    if (end == Outcome::kArrived) continue;
    if (threadIdx.x % 32 == 0) NoteFailure(call, end);
    return end;
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_ROW_SEGMENTS_CUH_
