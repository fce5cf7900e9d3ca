// The end of a kernel: who is last, and what that one tells the peers.
#ifndef JAX_EP_DEVICE_SIGNAL_CUH_
#define JAX_EP_DEVICE_SIGNAL_CUH_

#include "ffi/device/wait.cuh"

namespace jax_ep {

// Counts a block's part of some work as finished: true in the block that finishes the last of
// `total`. By all threads. No block waits for another. `to_peers`: this part stored to peers.
__device__ inline bool FinishPart(uint32_t* finished, uint32_t total, bool to_peers) {
  __shared__ bool is_last;
  __syncthreads();  // the block's accesses happen before what thread 0 does next
  if (threadIdx.x == 0) {
    // The fence makes this block's stores to peers performed at system scope here. The last block's
    // release would cover them by causality (counter: release here, acquire there); a fence in each
    // block does not ask one SM's fence to wait for another SM's stores. What stays in this
    // device's memory needs the counter alone, also if peers read it.
    if (to_peers) FenceSystem();
    is_last = AddAcquireReleaseDevice(finished, 1) == total - 1;
  }
  __syncthreads();
  return is_last;
}

// The end of a kernel: what its last block has to know.
struct BlockEnd {
  bool is_last;
  uint32_t num_failed;  // blocks, so far
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
  return {(sum & 0xffffu) == gridDim.x, sum >> 16};
}

// What the last block finds. By all of its threads.
__device__ inline Outcome FailureOf(const Call& call, const BlockEnd& end) {
  if (end.num_failed == 0) return Outcome::kArrived;
  const auto failure = static_cast<Outcome>(LoadAcquireDevice(&call.control->progress.failure));
  __syncthreads();  // before it is reset
  return failure;
}

// The peers' control blocks, in shared memory: what lies in my own is far again after each acquire.
struct PeerControls {
  ControlBlock* of[kMaxPeers];

  // By all threads of a block, before a barrier.
  __device__ void Load(const Call& call) {
    for (int peer = threadIdx.x; peer < call.control->num_ranks; peer += blockDim.x) {
      of[peer] = call.control->peers[peer].control;
    }
  }
};

// What peers find when this rank has entered the call. By one warp.
__device__ inline void StoreLines(const Call& call, uint64_t epoch, bool poisoned, const void* rows,
                                  const float* weights) {
  const ControlBlock* const control = call.control;
  ForPeers(control, [&](int peer) {
    FlagLine* const line = &control->peers[peer].control->ready[epoch % 2][control->rank];
    StoreRelaxedSystem(&line->fingerprint, CurrentFingerprint(call));
    StoreRelaxedSystem(&line->poisoned, poisoned ? 1 : 0);
    StoreRelaxedSystem(reinterpret_cast<uint64_t*>(&line->rows), reinterpret_cast<uint64_t>(rows));
    StoreRelaxedSystem(reinterpret_cast<uint64_t*>(&line->weights),
                       reinterpret_cast<uint64_t>(weights));
  });
}

// That it has, and that what they read after the gate is complete, also if there is none. By one
// warp of the block that finished the last part of that, or of the only one.
template <typename ControlOf>
__device__ inline void SignalReady(const Call& call, uint64_t epoch, ControlOf control_of) {
  const ControlBlock* const control = call.control;
  Delay(call, epoch, 2);
  ForPeers(control, [&](int peer) {
    // Release: after the line and all blocks' data, by program order or FinishPart.
    // SIGNAL_READY
    StoreReleaseSystem(&control_of(peer)->ready[epoch % 2][control->rank].epoch, epoch);
  });
}

// Both at once, where peers read nothing.
__device__ inline void Enter(const Call& call, uint64_t epoch, bool poisoned) {
  StoreLines(call, epoch, poisoned, nullptr, nullptr);
  SignalReady(call, epoch, [&](int peer) { return call.control->peers[peer].control; });
}

// Ends the call: the next is the next epoch, and the next kernel of the stream, or the next replay,
// finds nothing handed out. By the last block, or those of its threads that are `first` or higher.
__device__ inline void FinishCall(const Call& call, uint64_t epoch, int first = 0) {
  ControlBlock* const control = call.control;
  const int thread = static_cast<int>(threadIdx.x) - first;
  if (thread < 0) return;
  if (thread == 0) {
    control->epoch = epoch;
    control->blocks_finished = 0;
  }
  uint32_t* const words = reinterpret_cast<uint32_t*>(&control->progress);
#pragma unroll 1
  for (int i = thread; i < static_cast<int>(sizeof(Progress) / 4); i += blockDim.x - first) {
    words[i] = 0;
  }
}

// Likewise of a call whose peers read this rank's memory, or store to it without saying so: it does
// not end before all are done. By the last block. `outcome` is that of the call; the result says
// whether it still stands. If a rank gives up, what others read of its memory may be something else
// by now: their results have to be made safe.
__device__ inline Outcome FinishWithPeers(const Call& call, const PeerControls& peers,
                                          uint64_t epoch, Outcome outcome) {
  __shared__ Outcome end;
  const ControlBlock* const control = call.control;
  FinishCall(call, epoch, 32);
  if (threadIdx.x < 32) {
    Delay(call, epoch, 3);
    if (outcome == Outcome::kArrived) {
      ForPeers(control, [&](int peer) {
        // Release: orders all blocks' reads before it, too, by CountBlock; values that were read
        // have been stored since, so no read is still under way.
        // SIGNAL_DONE
        StoreReleaseSystem(&peers.of[peer]->done[control->rank].epoch, epoch);
      });
      outcome = WaitForReaders(call, epoch);
    }
    if (threadIdx.x == 0) end = outcome;
  }
  __syncthreads();
  return end;
}

// The end of a small call, by all threads of all blocks; `outcome` as above. If results have to be
// made safe, says why, in all threads of the block that has to do it.
__device__ inline Outcome FinishSmallCall(const Call& call, uint64_t epoch, Outcome outcome) {
  // All ranks wait in every call until all have entered it. One warp here, which has least to do.
  if (blockIdx.x == gridDim.x - 1 && threadIdx.x / 32 == blockDim.x / 32 - 1) {
    const Outcome others = PassGate(call, epoch);
    if (others != Outcome::kArrived) outcome = others;
  }
  const BlockEnd end = CountBlock(call, outcome);
  if (!end.is_last) return Outcome::kArrived;
  const Outcome failure = FailureOf(call, end);
  if (threadIdx.x == 0) {  // FinishCall, of what it uses alone: 18 instructions less
    ControlBlock* const control = call.control;
    control->epoch = epoch;
    control->blocks_finished = 0;
    control->progress.warp_tickets[0] = 0;
    control->progress.failure = 0;
  }
  return failure;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_SIGNAL_CUH_
