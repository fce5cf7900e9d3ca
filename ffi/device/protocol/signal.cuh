// What a rank tells its peers when it enters a call, and the end of a kernel: who is last, and what
// that one does.
#ifndef JAX_EP_DEVICE_PROTOCOL_SIGNAL_CUH_
#define JAX_EP_DEVICE_PROTOCOL_SIGNAL_CUH_

#include "ffi/device/protocol/wait.cuh"

namespace jax_ep {

// Counts a part of some work as finished, by the threads of a block that did it. `to_peers`: it
// stored to peers.
__device__ inline void FinishItem(uint32_t* finished, bool to_peers, const ThreadGroup& threads) {
  threads.Sync();  // their accesses happen before what the first one does next
  if (threads.number == 0) {
    // The fence makes this block's stores to peers performed at system scope here. The last block's
    // release would cover them by causality (counter: release here, acquire there); a fence in each
    // block does not ask one SM's fence to wait for another SM's stores. What stays in this
    // device's memory needs the counter alone.
    if (to_peers) FenceSystem();
    AddAcquireReleaseDevice(finished, 1);
  }
}

// The end of a kernel: what its last block has to know.
struct BlockEnd {
  bool is_last;
  bool has_failed;  // some block, so far
};

// To be called once, by all threads of all blocks, when their work is done and all stores to peers
// are performed. `outcome` is that of this thread's part. The number of blocks fits 16 bits.
__device__ inline BlockEnd CountBlock(const Call& call, Outcome outcome) {
  __shared__ uint32_t sum;
  const bool has_failed = __syncthreads_or(outcome != Outcome::kArrived);
  if (threadIdx.x == 0) {
    const uint32_t mine = has_failed ? 0x10001u : 1u;
    sum = mine + AddAcquireReleaseDevice(&call.control->blocks_finished, mine);
  }
  __syncthreads();
  return {(sum & 0xffffu) == gridDim.x, sum >> 16 != 0};
}

// What the last block finds. By all of its threads.
__device__ inline Outcome FailureOutcome(const Call& call, const BlockEnd& end) {
  if (!end.has_failed) return Outcome::kArrived;
  const auto failure = static_cast<Outcome>(LoadAcquireDevice(&call.control->progress.failure));
  __syncthreads();  // before it is reset
  return failure;
}

// Tells the peers that this rank has entered the call. By one warp.
__device__ inline void SignalEntry(const Call& call, uint64_t sequence, bool poisoned) {
  const ControlBlock* const control = call.control;
  InjectDelay(call, sequence, 2);
  ForPeers(control, [&](int peer) {
    EntryFlags* const line = &control->peers[peer].control->entry[sequence % 2][control->rank];
    StoreRelaxedSystem(&line->fingerprint, CurrentFingerprint(call));
    StoreRelaxedSystem(&line->poisoned, poisoned ? 1 : 0);
    // Release: after the rest of the line, and all that this rank's last call did.
    // SIGNAL_ENTRY
    StoreReleaseSystem(&line->sequence, sequence);
  });
}

// The same by the first warp of the threads that have the first ticket. There has to be memory for
// the call.
__device__ inline void SignalEntryOnFirstTicket(const Call& call, uint64_t sequence, int ticket,
                                                bool poisoned, const ThreadGroup& threads) {
  if (ticket == 0 && threads.number < 32 && MayStoreToPeers(call))
    SignalEntry(call, sequence, poisoned);
}

// Sets this rank's flag of a chunk at all peers: what they wait for at the wait_point. By one warp.
__device__ inline void SignalChunk(const Call& call, WaitPoint wait_point, int chunk,
                                   uint64_t sequence) {
  const ControlBlock* const control = call.control;
  ForPeers(control, [&](int peer) {
    ChunkFlags& flags = ChunkFlagsAt(control->peers[peer].control, wait_point);
    StoreReleaseSystem(&flags[control->rank][chunk], sequence);
  });
}

// The same, if lane 0 has counted the chunk's last part.
__device__ inline void SignalIfLast(const Call& call, bool is_last, WaitPoint wait_point, int chunk,
                                    uint64_t sequence, uint32_t salt) {
  if (!__shfl_sync(kFullWarp, is_last, 0)) return;
  InjectDelay(call, sequence, salt);
  __syncwarp();  // what lane 0 may have acquired by counting comes before each lane's release
  SignalChunk(call, wait_point, chunk, sequence);
}

// Ends the call: the next is the next sequence, and the next kernel of the stream, or the next
// replay, finds nothing handed out. By the last block.
__device__ inline void FinishCall(const Call& call, uint64_t sequence) {
  ControlBlock* const control = call.control;
  if (threadIdx.x == 0) {
    control->sequence = sequence;
    control->blocks_finished = 0;
  }
  uint32_t* const words = reinterpret_cast<uint32_t*>(&control->progress);
#pragma unroll 1
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(Progress) / 4); i += blockDim.x) {
    words[i] = 0;
  }
}

// The end of a small call, by all threads of all blocks; `outcome` is that of this thread's warp.
// If results have to be made safe, says why, in all threads of the block that has to do it.
__device__ inline Outcome FinishLowLatencyCall(const Call& call, uint64_t sequence,
                                               Outcome outcome) {
  // All ranks wait in every call until all have entered it. One warp here, which has least to do.
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x / 32 == blockDim.x / 32 - 1) {
    const Outcome others = WaitForEntry(call, sequence);
    if (others != Outcome::kArrived) outcome = others;
  }
  const BlockEnd end = CountBlock(call, outcome);
  if (!end.is_last) return Outcome::kArrived;
  const Outcome failure = FailureOutcome(call, end);
  if (threadIdx.x == 0) {  // FinishCall, of what it uses alone: 18 instructions less
    ControlBlock* const control = call.control;
    control->sequence = sequence;
    control->blocks_finished = 0;
    control->progress.warp_tickets = 0;
    control->progress.failure = 0;
  }
  return failure;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_SIGNAL_CUH_
