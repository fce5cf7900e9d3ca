// The end of a kernel: who is last, and what that one tells the peers.
#ifndef JAX_EP_DEVICE_SIGNAL_CUH_
#define JAX_EP_DEVICE_SIGNAL_CUH_

#include "ffi/device/wait.cuh"

namespace jax_ep {

// True in the block that finishes last, of those of the kernel. To be called once, by all threads
// of all blocks, when their work is done. No block waits for another.
__device__ inline bool IsLastBlock(const Call& call) {
  __shared__ bool is_last;
  __syncthreads();  // the block's accesses happen before what thread 0 does next
  if (threadIdx.x == 0) {
    // The fence makes this block's stores to peers performed at system scope here. The last block's
    // release would cover them by causality (counter: release here, acquire there); a fence in each
    // block does not ask one SM's fence to wait for another SM's stores.
    FenceSystem();
    uint32_t* const counter = &call.control->blocks_finished;
    is_last = AddAcquireReleaseDevice(counter, 1) == gridDim.x - 1;
    if (is_last) *counter = 0;  // for the next kernel of the stream, or the next replay
  }
  __syncthreads();
  return is_last;
}

// Tells every peer that this rank has entered the call and that its data is complete, also if there
// is none. By the last block of the kernel that wrote the data.
__device__ inline void SignalReady(const Call& call, uint64_t epoch, bool poisoned) {
  const ControlBlock* const control = call.control;
  Delay(call, epoch, 2);
  for (int peer = threadIdx.x; peer < control->num_ranks; peer += blockDim.x) {
    if (peer == control->rank) continue;
    FlagLine* const line = &control->peers[peer].control->ready[control->rank];
    StoreRelaxedSystem(&line->fingerprint, CurrentFingerprint(call));
    StoreRelaxedSystem(&line->poisoned, poisoned ? 1 : 0);
    // Release: after the two fields, by program order, and after all blocks' data, by IsLastBlock.
    StoreReleaseSystem(&line->epoch, epoch);
  }
}

// Ends the call: peers may overwrite what this rank read, and the next call is the next epoch. By
// the last block of the call's last kernel.
__device__ inline void FinishCall(const Call& call, uint64_t epoch, Outcome outcome) {
  ControlBlock* const control = call.control;
  Delay(call, epoch, 3);
  const bool aborted = outcome != Outcome::kArrived && outcome != Outcome::kPoisoned;
  for (int peer = threadIdx.x; peer < control->num_ranks; peer += blockDim.x) {
    if (peer == control->rank || aborted) continue;
    // Release: orders all blocks' reads before it, too, by IsLastBlock; values that were read have
    // been stored since, so no read is still under way.
    StoreReleaseSystem(&control->peers[peer].control->done[control->rank].epoch, epoch);
  }
  // Read by later kernels of the stream only.
  if (threadIdx.x == 0) control->epoch = epoch;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_SIGNAL_CUH_
