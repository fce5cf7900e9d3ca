// The memory of small calls, and waiting for what comes there.
#ifndef JAX_EP_DEVICE_SMALL_MEMORY_CUH_
#define JAX_EP_DEVICE_SMALL_MEMORY_CUH_

#include "ffi/device/small.h"
#include "ffi/device/wait.cuh"

namespace jax_ep {

// The halves that a call uses, and the tag that is on all it stores there. What a half happens to
// hold has another: the tag is a hash of 64 bits of the call, its epoch and its generation.
//
// What lies in the control block is loaded once: after each acquire it would be far again.
class SmallMemory {
 public:
  // A half of a rank.
  class Half {
   public:
    __device__ Half(const Call& call, unsigned char* workspace, int64_t number)
        : call_(call), workspace_(workspace), number_(number) {}

    __device__ uint4* rows() const { return At<uint4>(kSmallRows, kSmallRowBytes); }
    __device__ Packet* packets() const {
      return At<Packet>(kSmallPackets, kSmallChoices * int64_t{sizeof(Packet)});
    }
    __device__ float* scalars() const { return reinterpret_cast<float*>(packets()); }
    __device__ uint64_t* flags() const {
      return At<uint64_t>(kSmallFlags, kSmallPieces * int64_t{sizeof(uint64_t)});
    }

   private:
    template <typename T>
    __device__ T* At(Buffer buffer, int64_t bytes) const {
      return reinterpret_cast<T*>(workspace_ + call_.offsets[buffer] + number_ * bytes);
    }

    const Call& call_;
    unsigned char* const workspace_;
    const int64_t number_;
  };

  __device__ SmallMemory(const Call& call, uint64_t epoch)
      : call_(call),
        half_(epoch % 2),
        tag_(Hash(CurrentFingerprint(call) ^ Hash(epoch))),
        rank_(call.control->rank),
        workspace_(call.control->peers[rank_].workspace) {}

  __device__ uint64_t tag() const { return tag_; }
  __device__ int rank() const { return rank_; }
  __device__ Half Mine() const { return {call_, workspace_, half_}; }
  __device__ Half Of(int peer) const {
    return {call_, call_.control->peers[peer].workspace, half_};
  }

 private:
  __device__ static uint64_t Hash(uint64_t value) {
    value = (value ^ (value >> 31)) * 0xbf58476d1ce4e5b9ull;
    return (value ^ (value >> 29)) * 0x94d049bb133111ebull;
  }

  const Call& call_;
  const int64_t half_;
  const uint64_t tag_;
  const int rank_;
  unsigned char* const workspace_;
};

// Whether a small call may store to its peers, and signal: an abort says that this rank may be
// ahead of one that still reads an earlier call's pieces. By one whole warp; all lanes return the
// same.
__device__ inline bool MayPush(const Call& call) {
  return __shfl_sync(kWholeWarp, LoadRelaxedSystem(&call.control->abort), 0) == 0;
}

// The flags of the pieces that a warp has stored, kept back for some pieces: a release waits until
// all stores before it have arrived, and the next pieces' need not wait for that.
class PieceFlags {
 public:
  __device__ explicit PieceFlags(const SmallMemory& memory) : memory_(memory) {}

  // The piece is stored.
  __device__ void Add(uint64_t* flag) {
    if (static_cast<int>(threadIdx.x % 32) == count_) flag_ = flag;
    if (++count_ == 32) Signal();
  }

  __device__ void Signal() {
    __syncwarp();  // all lanes' stores come before each lane's flag
    // SIGNAL_PIECE
    if (flag_ != nullptr) StoreReleaseSystem(flag_, memory_.tag());
    flag_ = nullptr;
    count_ = 0;
  }

 private:
  const SmallMemory& memory_;
  uint64_t* flag_ = nullptr;
  int count_ = 0;
};

// By one warp of the kernel, when it has done its part: all ranks have entered this call, and it is
// the same.
__device__ __noinline__ inline Outcome KeepGate(const Call& call, uint64_t epoch) {
  if (!HasWorkspace(call)) {
    AbortGroup(call, Outcome::kNoWorkspace, Gate::kReady, call.control->rank, epoch);
  }
  return WaitForPeers(call, Gate::kReady, epoch);  // WAIT_READY
}

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
    if (end != Outcome::kArrived) return end;
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_SMALL_MEMORY_CUH_
