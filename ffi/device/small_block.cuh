// What the blocks of a small call have in common: whether something failed, and the end.
#ifndef JAX_EP_DEVICE_SMALL_BLOCK_CUH_
#define JAX_EP_DEVICE_SMALL_BLOCK_CUH_

#include "ffi/device/pieces.cuh"
#include "ffi/device/signal.cuh"

namespace jax_ep {

// By all threads of a block.
class SmallBlock {
 public:
  __device__ SmallBlock(const Call& call, uint64_t epoch) : call_(call), epoch_(epoch) {
    if (threadIdx.x == 0) Failed() = 0;
    __syncthreads();
  }

  // A warp's part ended like this. The results of the call are not to be trusted if it is not
  // kArrived.
  __device__ void Note(Outcome outcome) {
    if (outcome == Outcome::kArrived || threadIdx.x % 32 != 0) return;
    Failed() = 1;
    NoteFailure(call_, outcome);
  }

  // The same in all threads, after a barrier.
  __device__ bool has_failed() const { return Failed() != 0; }

  // The end of the block's part. If results have to be made safe, says why, in all threads of the
  // block that has to do it.
  __device__ Outcome Finish(Outcome own) {
    // All ranks wait in every call until all have entered it. One warp here, which has least to do.
    if (blockIdx.x == gridDim.x - 1 && threadIdx.x / 32 == blockDim.x / 32 - 1) {
      const Outcome outcome = PassGate(call_, epoch_);
      Note(outcome == Outcome::kArrived ? own : outcome);
    }
    __syncthreads();
    const BlockEnd end = CountBlock(call_, has_failed());
    if (!end.is_last) return Outcome::kArrived;
    const Outcome failure = FailureOf(call_, end);
    if (threadIdx.x == 0) EndCall();
    return failure;
  }

 private:
  // FinishCall, of what a small call uses.
  __device__ void EndCall() {
    ControlBlock* const control = call_.control;
    control->epoch = epoch_;
    control->blocks_finished = 0;
    control->progress.warp_tickets[0] = 0;
    control->progress.failure = 0;
  }

  __device__ static uint32_t& Failed() {
    __shared__ uint32_t failed;
    return failed;
  }

  const Call& call_;
  const uint64_t epoch_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_SMALL_BLOCK_CUH_
