// The one place where kernels wait, and how waiting ends if nobody comes.
//
// Whoever waits goes by what it sees itself. What failed is written down, and the last block of the
// call makes all results safe, so that they are whole or safe but never a mixture. A block waits
// for remote flags and for holders of lower tickets only (tickets.cuh). Remote flags may depend on
// what this rank has brought, so who brings counts it before it waits: one resident block is enough
// for progress.
#ifndef JAX_EP_DEVICE_PROTOCOL_WAIT_CUH_
#define JAX_EP_DEVICE_PROTOCOL_WAIT_CUH_

#include "ffi/device/common/thread_group.cuh"
#include "ffi/device/protocol/call.h"
#include "ffi/device/ptx/memory.cuh"

namespace jax_ep {

inline constexpr uint32_t kFullWarp = 0xffffffffu;

// Stable while the kernel of the call runs: its last block advances it when all others
// have counted themselves finished.
__device__ inline uint64_t CurrentSequence(const Call& call) { return call.control->sequence + 1; }

// What peers compare: a generation more is another call, too.
__device__ inline uint64_t CurrentFingerprint(const Call& call) {
  return call.fingerprint ^ (call.control->generation * 0x9e3779b97f4a7c15ull);
}

// For tests: makes orders happen that are rare by themselves.
__device__ inline void InjectDelay(const Call& call, uint64_t sequence, uint32_t salt) {
  const uint64_t most = call.control->max_delay_ns;
  if (most == 0) return;
  uint64_t hash = (sequence * 64 + call.control->rank) * 1024 + blockIdx.x * 8 + salt;
  hash = (hash ^ (hash >> 31)) * 0xbf58476d1ce4e5b9ull;
  const uint64_t delay = (hash >> 33) % most;
  for (const uint64_t start = Nanoseconds(); Nanoseconds() - start < delay;) __nanosleep(200);
}

// By one thread.
__device__ inline void WriteRecord(const Call& call, AbortRecord* record, Outcome outcome,
                                   WaitPoint wait_point, int peer, uint64_t sequence) {
  const ControlBlock* const control = call.control;
  record->rank = control->rank;
  record->peer = peer;
  record->operation = call.operation;
  record->wait_point = wait_point;
  record->outcome = outcome;
  record->sequence = sequence;
  record->generation = control->generation;
  // Release: the host that sees it posted sees the fields.
  StoreReleaseSystem(&record->posted, 1u);
}

// Tells the host whom this rank waits for, once a wait_point and device. By one thread.
__device__ inline void WarnHost(const Call& call, WaitPoint wait_point, int peer,
                                uint64_t sequence) {
  ControlBlock* const control = call.control;
  if (control->warning == nullptr) return;
  const uint64_t key = sequence * 4 + static_cast<uint32_t>(wait_point);
  const uint64_t before = LoadAcquireSystem(&control->warned);
  if (before >= key || CompareAndSwapDevice(&control->warned, before, key) != before) return;
  // The host has yet to read another: it will be told of that one.
  if (LoadAcquireSystem(&control->warning->posted) != 0) return;
  WriteRecord(call, control->warning, Outcome::kArrived, wait_point, peer, sequence);
}

// use(peer), of each rank but mine. By one warp.
template <typename Use>
__device__ inline void ForPeers(const ControlBlock* control, Use use) {
#pragma unroll 1
  for (int peer = threadIdx.x % 32; peer < control->num_ranks; peer += 32) {
    if (peer != control->rank) use(peer);
  }
}

// Tells all peers to end this call and all later ones of the generation. By one warp.
__device__ inline void ForwardAbort(const Call& call, uint32_t word) {
  const ControlBlock* const control = call.control;
  ForPeers(control, [&](int peer) {
    // Nothing is published by this word; its order does not matter. It may replace another cause.
    StoreReleaseSystem(&control->peers[peer].control->abort, word);
  });
}

// Ends this call and all later ones of the generation, on all ranks. By one warp.
__device__ inline void AbortGroup(const Call& call, Outcome outcome, WaitPoint wait_point, int peer,
                                  uint64_t sequence) {
  ControlBlock* const control = call.control;
  const auto word = static_cast<uint32_t>(outcome);
  // The first of this device reports. Who finds the word set by a peer leaves the report to that.
  const bool is_leader = threadIdx.x % 32 == 0;
  if (is_leader && CompareAndSwapSystem(&control->abort, 0, word) == 0 && control->report) {
    WriteRecord(call, control->report, outcome, wait_point, peer, sequence);
  }
  ForwardAbort(call, word);
}

// How long a wait may go on. By one whole warp.
class Deadline {
 public:
  __device__ Deadline(const Call& call, WaitPoint wait_point, uint64_t sequence)
      : call_(call), wait_point_(wait_point), sequence_(sequence) {
    Restart();
  }
  __device__ void Restart() { start_ = Nanoseconds(); }

  // Between two looks for `peer`; kArrived if there may be another. All lanes return the same.
  __device__ Outcome Try(uint32_t peer) {
    const ControlBlock* const control = call_.control;
    const uint64_t limit = wait_point_ == WaitPoint::kEntry ? control->entry_deadline_ns
                                                            : control->progress_deadline_ns;
    const uint64_t waited = __shfl_sync(kFullWarp, Nanoseconds() - start_, 0);
    if (waited > limit) {
      AbortGroup(call_, Outcome::kTimeout, wait_point_, static_cast<int>(peer), sequence_);
      return Outcome::kTimeout;
    }
    if (waited > control->warning_ns && !warned_) {
      warned_ = true;
      if (threadIdx.x % 32 == 0) WarnHost(call_, wait_point_, static_cast<int>(peer), sequence_);
    }
    return Outcome::kArrived;
  }

 private:
  const Call& call_;
  const WaitPoint wait_point_;
  const uint64_t sequence_;
  uint64_t start_;
  bool warned_ = false;
};

// Something in this kernel ended like this: for the last block. By one thread. That a peer is
// poisoned counts less than that the group is aborted.
__device__ inline void RecordFailure(const Call& call, Outcome outcome) {
  uint32_t* const failure = &call.control->progress.failure;
  const auto word = static_cast<uint32_t>(outcome);
  if (outcome == Outcome::kPoisoned) {
    atomicCAS(failure, 0u, word);
  } else {
    atomicExch(failure, word);
  }
}

// What a small call by a plan begins with: a plan that has a status poisons it. By all threads.
__device__ inline Outcome PlanOutcome(const Call& call, const int32_t* status) {
  if (*status == 0) return Outcome::kArrived;
  if (threadIdx.x == 0) RecordFailure(call, Outcome::kPoisoned);
  return Outcome::kPoisoned;
}

// Waits until flag(peer), an address, has reached `sequence` for every peer; arrived() then reads
// what came with the flags. By one whole warp; all lanes return the same.
template <typename Flag, typename Arrived>
__device__ inline Outcome WaitForFlags(const Call& call, WaitPoint wait_point, uint64_t sequence,
                                       Flag flag, Arrived arrived) {
  const ControlBlock* const control = call.control;
  Deadline patience(call, wait_point, sequence);
  while (true) {
    // Acquire: what the peer did before it released this sequence has happened. At kEntry that is
    // all of its last call, at kChunk what it has sent, too.
    uint32_t missing = kMaxRanks;
    ForPeers(control, [&](int peer) {
      const bool is_there = LoadAcquireSystem(flag(peer)) >= sequence;
      if (!is_there) missing = min(missing, static_cast<uint32_t>(peer));
    });
    missing = __reduce_min_sync(kFullWarp, missing);
    // It counts more than the flags, so it is loaded after them.
    const uint32_t word = LoadRelaxedSystem(&control->abort);
    if (missing == kMaxRanks) arrived();  // meanwhile
    const uint32_t aborted = __shfl_sync(kFullWarp, word, 0);
    // It is passed on before anybody hears of it here: this rank goes on to signal parts for which
    // nothing was stored, and who sees the signal shall see the abort.
    if (aborted != 0) {
      ForwardAbort(call, aborted);
      return static_cast<Outcome>(aborted);
    }
    if (missing == kMaxRanks) return Outcome::kArrived;
    const Outcome end = patience.Try(missing);
    if (end != Outcome::kArrived) return end;
    __nanosleep(40);
  }
}

// What a peer's line says, when its sequence has come: it is this call's. The next one's stands
// elsewhere, and in the one after that the peer has seen me enter the next. By any lanes.
__device__ inline Outcome ReadEntryFlags(const Call& call, const EntryFlags& line) {
  if (LoadRelaxedSystem(&line.fingerprint) != CurrentFingerprint(call)) return Outcome::kMismatch;
  return LoadRelaxedSystem(&line.poisoned) != 0 ? Outcome::kPoisoned : Outcome::kArrived;
}

// Whether there is memory for the call, in the group that it is for.
__device__ inline bool HasWorkspace(const Call& call) {
  const ControlBlock* const control = call.control;
  return call.workspace_bytes <= control->workspace_bytes && call.num_ranks == control->num_ranks;
}

// Whether a call may store to its peers, and signal, before it has waited: an abort says that this
// rank may be ahead of one that still reads what an earlier call stored. By one whole warp; all
// lanes return the same.
__device__ inline bool MayStoreToPeers(const Call& call) {
  return __shfl_sync(kFullWarp, LoadRelaxedSystem(&call.control->abort), 0) == 0;
}

__device__ inline Outcome PollEntry(const Call& call, uint64_t sequence) {
  const ControlBlock* const control = call.control;
  if (!HasWorkspace(call)) {
    AbortGroup(call, Outcome::kNoWorkspace, WaitPoint::kEntry, control->rank, sequence);
    return Outcome::kNoWorkspace;
  }
  const EntryFlags* const lines = control->entry[sequence % 2];
  uint32_t other = kMaxRanks;
  bool poisoned = false;
  const auto flag = [&](int peer) { return &lines[peer].sequence; };
  const Outcome outcome = WaitForFlags(call, WaitPoint::kEntry, sequence, flag, [&] {  // WAIT_ENTRY
    // Stored by the peer before its release of `sequence`, which this lane has acquired.
    ForPeers(control, [&](int peer) {
      const Outcome said = ReadEntryFlags(call, lines[peer]);
      if (said == Outcome::kMismatch) other = min(other, static_cast<uint32_t>(peer));
      poisoned |= said == Outcome::kPoisoned;
    });
  });
  if (outcome != Outcome::kArrived) return outcome;
  other = __reduce_min_sync(kFullWarp, other);
  if (other != kMaxRanks) {
    AbortGroup(call, Outcome::kMismatch, WaitPoint::kEntry, other, sequence);
    return Outcome::kMismatch;
  }
  return __any_sync(kFullWarp, poisoned) ? Outcome::kPoisoned : Outcome::kArrived;
}

// The wait_point of every call: all ranks have entered it, and it is the same. By one whole warp;
// all lanes return the same, and what each has acquired happens before what any does next.
__device__ inline Outcome WaitForEntry(const Call& call, uint64_t sequence) {
  const Outcome outcome = PollEntry(call, sequence);
  if (outcome != Outcome::kArrived && threadIdx.x % 32 == 0) RecordFailure(call, outcome);
  __syncwarp();
  return outcome;
}

// What the first warp of threads of a block waits for, for all of them. A barrier has to follow
// before the next.
template <typename Wait>
__device__ inline Outcome WaitForAll(const Call& call, uint64_t sequence,
                                     const ThreadGroup& threads, Wait wait) {
  __shared__ Outcome outcome;
  if (threads.number < 32) {
    InjectDelay(call, sequence, 1);
    const Outcome mine = wait();
    if (threads.number == 0) outcome = mine;
  }
  // From one warp to all: a barrier is causality within the block.
  threads.Sync();
  return outcome;
}

// The wait_point for threads of a block, each block for itself.
__device__ inline Outcome WaitForEntry(const Call& call, uint64_t sequence,
                                       const ThreadGroup& threads) {
  return WaitForAll(call, sequence, threads, [&] { return WaitForEntry(call, sequence); });
}

// What is set at a wait_point of chunks, kChunk or kCredit, in the block of the rank that waits
// there.
__device__ inline ChunkFlags& ChunkFlagsAt(ControlBlock* control, WaitPoint wait_point) {
  return wait_point == WaitPoint::kCredit ? control->credits : control->chunks_sent;
}

// Waits for a chunk of what every peer sends (kChunk), or has brought of mine (kCredit). By one
// whole warp; all lanes return the same.
__device__ inline Outcome WaitForChunk(const Call& call, WaitPoint wait_point, int chunk,
                                       uint64_t sequence) {
  const ChunkFlags& flags = ChunkFlagsAt(call.control, wait_point);
  const auto flag = [&](int peer) { return &flags[peer][chunk]; };
  const Outcome outcome = WaitForFlags(call, wait_point, sequence, flag, [] {});
  if (outcome != Outcome::kArrived && threadIdx.x % 32 == 0) RecordFailure(call, outcome);
  __syncwarp();  // what each lane has acquired happens before what any does next
  return outcome;
}

// How many chunks, the first ones, have come from all peers, at a look. By one whole warp.
__device__ inline int CountChunks(const Call& call, uint64_t sequence) {
  static_assert(kMaxChunks == 32);  // one for each lane
  const ControlBlock* const control = call.control;
  bool is_there = true;
#pragma unroll 1
  for (int peer = 0; peer < control->num_ranks; ++peer) {
    if (peer == control->rank) continue;
    is_there &= LoadAcquireSystem(&control->chunks_sent[peer][threadIdx.x % 32]) >= sequence;
  }
  __syncwarp();  // what each lane has acquired happens before what any does next
  const int missing = __ffs(~__ballot_sync(kFullWarp, is_there));
  return missing == 0 ? kMaxChunks : missing - 1;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_WAIT_CUH_
