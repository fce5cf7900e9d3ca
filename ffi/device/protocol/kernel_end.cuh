// The end of a kernel: blocks count themselves, and the last one ends the call.
#ifndef JAX_EP_DEVICE_PROTOCOL_KERNEL_END_CUH_
#define JAX_EP_DEVICE_PROTOCOL_KERNEL_END_CUH_

#include "ffi/device/protocol/claim.cuh"
#include "ffi/device/protocol/wait.cuh"

namespace jax_ep {

struct BlockEnd {
  bool is_last;     // the last block of the kernel
  bool has_failed;  // this block, or one that has ended before
};

// Called exactly once by all threads of all blocks, after their work is done and all their stores
// to peers are performed. `outcome` is the outcome of this thread's work. Block counts fit 16 bits.
__device__ inline BlockEnd FinishBlock(const CallParams& call, const RoleContext& role,
                                       Outcome outcome) {
  const ProfileSpan span(SpanKind::kWaitBlock);
  const bool has_failed = __syncthreads_or(outcome != Outcome::kArrived);
  uint32_t* const finished = &role.scratch->blocks_finished;
  if (role.Thread() == 0) {
    const uint32_t own = has_failed ? 0x10001u : 1u;
    *finished = own + AddAcquireReleaseDevice(&call.control->blocks_finished, own);
  }
  role.Sync();
  const uint32_t sum = *finished;
  return {(sum & 0xffffu) == static_cast<uint32_t>(role.num_blocks), sum >> 16 != 0};
}

// Called by all threads of the last block. Returns the outcome of the whole kernel.
__device__ inline Outcome KernelOutcome(const CallParams& call, const RoleContext& role,
                                        const BlockEnd& end) {
  if (!end.has_failed) return Outcome::kArrived;
  const auto failure = static_cast<Outcome>(LoadAcquireDevice(&call.control->progress.failure));
  role.Sync();  // before it is reset
  return failure;
}

// Called by the last block, after all results are written. Resets the counters for the next call,
// and frees the claim last: from then on the next call may run, in whatever stream it is.
__device__ inline void FinishCall(const CallParams& call, const RoleContext& role,
                                  uint64_t sequence) {
  ControlBlock* const control = call.control;
  uint32_t* const words = reinterpret_cast<uint32_t*>(&control->progress);
#pragma unroll 1
  for (int i = role.Thread(); i < Progress::UsedWords(call.num_ranks); i += role.num_threads) {
    words[i] = 0;
  }
  if (role.Thread() == 0) control->blocks_finished = 0;
  role.Sync();
  if (role.Thread() == 0) {
    FenceDevice();
    EndClaim(call, sequence);
  }
}

// Called by all threads of all blocks of a low-latency kernel; `outcome` is that of this thread's
// warp. Ends the call. After a failure the last block makes the results safe by make_safe(failure).
template <typename MakeSafe>
__device__ inline void FinishLowLatencyCall(const CallParams& call, const RoleContext& role,
                                            uint64_t sequence, Outcome outcome,
                                            MakeSafe make_safe) {
  // In every call all ranks wait until all have entered it: the double buffering of the eager
  // buffers relies on it. The last warp of the last block waits, because it has the least other
  // work.
  if (role.block == role.num_blocks - 1 && role.Warp() == role.NumWarps() - 1) {
    const Outcome entry = WaitForEntry(call, sequence);
    if (entry != Outcome::kArrived) outcome = entry;
  }
  const BlockEnd end = FinishBlock(call, role, outcome);
  if (!end.is_last) return;
  const Outcome failure = KernelOutcome(call, role, end);
  if (failure != Outcome::kArrived) {
    make_safe(failure);
    role.Sync();
  }
  // FinishCall for the counters that these kernels use: 18 instructions less. There is no fence
  // that the kernel would wait for: its end orders the counters before the next call of the stream.
  // A call of another stream that draws tickets before they are reset draws some of them twice, and
  // an item that is sent twice is the same. A generation that starts after a contested call keeps
  // its claim for longer than these stores take.
  if (role.Thread() == 0) {
    ControlBlock* const control = call.control;
    control->blocks_finished = 0;
    control->progress.low_latency_tickets = 0;
    control->progress.failure = 0;
    EndClaim(call, sequence);
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_KERNEL_END_CUH_
