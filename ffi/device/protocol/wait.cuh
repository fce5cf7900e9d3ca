// Waits for flags of peers. A wait ends when its flags arrive, when the group is aborted, or at a
// deadline.
//
// Each waiter decides by what it sees itself, so some blocks of a kernel may pass a wait where
// others fail. Failures are recorded, and the last block of the call makes all results safe:
// results are whole or safe, never a mixture.
//
// One resident block is enough for progress. A block waits only for flags of peers and for holders
// of lower tickets (work_items.cuh). Credits depend on what this rank has expanded, so a warp
// counts the tokens that it has expanded before it waits.
#ifndef JAX_EP_DEVICE_PROTOCOL_WAIT_CUH_
#define JAX_EP_DEVICE_PROTOCOL_WAIT_CUH_

#include "ffi/device/profile/recorder.cuh"
#include "ffi/device/protocol/deadline.cuh"
#include "ffi/device/protocol/role_context.cuh"

namespace jax_ep {

// Called by one whole warp; all lanes return the same. Waits until the flag at address flag(peer)
// has reached `sequence` for every peer. Then arrived() reads what came with the flags.
template <typename Flag, typename Arrived>
__device__ inline Outcome WaitForFlags(const CallParams& call, WaitPoint wait_point,
                                       uint64_t sequence, Flag flag, Arrived arrived) {
  const ControlBlock* const control = call.control;
  const Inbox* const inbox = control->inbox;
  Deadline deadline(call, wait_point, sequence);
  while (true) {
    // Acquire: everything that the peer did before it released this sequence has happened. At
    // kEntry that is its whole last call; at kChunk also the rows it has sent.
    uint32_t missing = kMaxRanks;
    ForEachPeer(control, [&](int peer) {
      const bool has_arrived = LoadAcquireSystem(flag(peer)) >= sequence;
      if (!has_arrived) missing = min(missing, static_cast<uint32_t>(peer));
    });
    missing = __reduce_min_sync(kFullWarp, missing);
    // The abort word overrides the flags, so it is loaded after them.
    const uint32_t word = LoadRelaxedSystem(&inbox->abort);
    if (missing == kMaxRanks) arrived();  // overlaps with the load
    const uint32_t aborted = __shfl_sync(kFullWarp, word, 0);
    // The abort is forwarded before anyone on this rank can see it. This rank goes on to signal
    // chunks for which nothing was stored, and a peer that sees such a signal must see the abort.
    if (aborted != 0) {
      ForwardAbort(call, aborted);
      return static_cast<Outcome>(aborted);
    }
    if (missing == kMaxRanks) return Outcome::kArrived;
    const Outcome outcome = deadline.Check(missing);
    if (outcome != Outcome::kArrived) return outcome;
    __nanosleep(40);
  }
}

// Returns what a peer's entry flags say once their sequence has arrived. They are still those of
// this call: the next call uses the other buffer, and a peer enters the one after that only after
// it has seen this rank enter the next. May be called by any lanes.
__device__ inline Outcome ReadEntryFlags(const CallParams& call, const EntryFlags& flags) {
  if (LoadRelaxedSystem(&flags.fingerprint) != call.fingerprint) return Outcome::kMismatch;
  return LoadRelaxedSystem(&flags.poisoned) != 0 ? Outcome::kPoisoned : Outcome::kArrived;
}

// Called by WaitForEntry.
__device__ inline Outcome WaitForEntryFlags(const CallParams& call, uint64_t sequence) {
  const ControlBlock* const control = call.control;
  if (!HasWorkspace(call)) {
    AbortGroup(call, Outcome::kNoWorkspace, WaitPoint::kEntry, control->rank, sequence);
    return Outcome::kNoWorkspace;
  }
  const EntryFlags* const entry = control->inbox->entry[sequence % 2];
  uint32_t mismatched = kMaxRanks;
  bool poisoned = false;
  const auto flag = [&](int peer) { return &entry[peer].sequence; };
  const Outcome outcome = WaitForFlags(call, WaitPoint::kEntry, sequence, flag, [&] {  // WAIT_ENTRY
    // The peer stored them before it released `sequence`, which this lane has acquired.
    ForEachPeer(control, [&](int peer) {
      const Outcome read = ReadEntryFlags(call, entry[peer]);
      if (read == Outcome::kMismatch) mismatched = min(mismatched, static_cast<uint32_t>(peer));
      poisoned |= read == Outcome::kPoisoned;
    });
  });
  if (outcome != Outcome::kArrived) return outcome;
  mismatched = __reduce_min_sync(kFullWarp, mismatched);
  if (mismatched != kMaxRanks) {
    AbortGroup(call, Outcome::kMismatch, WaitPoint::kEntry, mismatched, sequence);
    return Outcome::kMismatch;
  }
  return __any_sync(kFullWarp, poisoned) ? Outcome::kPoisoned : Outcome::kArrived;
}

// Called by one whole warp; all lanes return the same. Waits until all ranks have entered the call,
// and checks that it is the same call on all of them. What each lane has acquired happens before
// what any lane does next.
__device__ inline Outcome WaitForEntry(const CallParams& call, uint64_t sequence) {
  const ProfileSpan span(SpanKind::kWaitEntry);
  const Outcome outcome = WaitForEntryFlags(call, sequence);
  if (outcome != Outcome::kArrived && LaneIndex() == 0) RecordFailure(call, outcome);
  __syncwarp();
  return outcome;
}

// Called by a role; its threads of one block return the same. The first warp waits by wait(). A
// barrier of the role has to follow before the next call.
template <typename Wait>
__device__ inline Outcome WaitByFirstWarp(const CallParams& call, uint64_t sequence,
                                          const RoleContext& role, Wait wait) {
  if (role.Warp() == 0) {
    InjectDelay(call, sequence, 1);
    const Outcome own = wait();
    if (role.Thread() == 0) role.scratch->outcome = static_cast<uint32_t>(own);
  }
  // Orders what the first warp has acquired before what the role does next: a barrier is causality
  // within the block.
  role.Sync();
  return static_cast<Outcome>(role.scratch->outcome);
}

// WaitForEntry for a role. Each block waits for itself.
__device__ inline Outcome WaitForEntry(const CallParams& call, uint64_t sequence,
                                       const RoleContext& role) {
  return WaitByFirstWarp(call, sequence, role, [&] { return WaitForEntry(call, sequence); });
}

// Called by one whole warp; all lanes return the same. Waits until every peer has sent `chunk`
// (kChunk), or has returned the credit for this rank's `chunk` (kCredit).
__device__ inline Outcome WaitForChunk(const CallParams& call, WaitPoint wait_point, int chunk,
                                       uint64_t sequence) {
  const ProfileSpan span(wait_point == WaitPoint::kCredit ? SpanKind::kWaitCredit
                                                          : SpanKind::kWaitChunk);
  const ChunkFlags& flags = ChunkFlagsAt(call.control->inbox, wait_point);
  const auto flag = [&](int peer) { return &flags[peer][chunk]; };
  const Outcome outcome = WaitForFlags(call, wait_point, sequence, flag, [] {});
  if (outcome != Outcome::kArrived && LaneIndex() == 0) RecordFailure(call, outcome);
  __syncwarp();  // orders what each lane has acquired before what any lane does next
  return outcome;
}

// Called by one whole warp. Returns how many chunks, in order, have arrived from all peers; does
// not wait.
__device__ inline int CountArrivedChunks(const CallParams& call, uint64_t sequence) {
  static_assert(kMaxChunks == 32, "each lane polls one chunk");
  const ControlBlock* const control = call.control;
  const ChunkFlags& chunks_sent = control->inbox->chunks_sent;
  bool has_arrived = true;
#pragma unroll 1
  for (int i = 0; i < control->num_peers; ++i) {
    const int peer = control->peer_ranks[i];
    has_arrived &= LoadAcquireSystem(&chunks_sent[peer][LaneIndex()]) >= sequence;
  }
  __syncwarp();  // orders what each lane has acquired before what any lane does next
  const int missing = __ffs(~__ballot_sync(kFullWarp, has_arrived));
  return missing == 0 ? kMaxChunks : missing - 1;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_WAIT_CUH_
