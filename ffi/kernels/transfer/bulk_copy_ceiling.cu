// The bandwidth of bulk copies, as a baseline for benchmarks: each row of this rank is stored to
// the workspace of one peer. All warps copy; there is nothing to find and nothing to wait for in
// between.
#include "ffi/device/protocol/kernel_end.cuh"
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/protocol/work_items.cuh"
#include "ffi/device/transfer/dispatch/row_copies.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

// Row t of rank r goes to row t of rank r + 1 + t % (R - 1), so no two ranks write the same row.
__device__ void SendRows(const BulkCopyCeilingParams& params, const RoleContext& role) {
  const CallParams& call = params.call;
  if (role.Warp() >= params.pipeline.num_warps) return;
  const ProfileSpan span(SpanKind::kSend);
  const int num_peers = max(call.num_ranks - 1, 1);
  const int stride = params.pipeline.num_warps * role.num_blocks;
  RowCopies copies(params.pipeline, role, call, nullptr);
  copies.Begin();
  for (int repeat = 0; repeat < params.repeats; ++repeat) {
    for (int row = role.GridWarp(); row < call.num_tokens; row += stride) {
      const int peer = (call.control->rank + 1 + row % num_peers) % call.num_ranks;
      const int64_t first = int64_t{row} * call.wire_vectors;
      PeerPointer<uint4> destinations[2] = {};
      if (LaneIndex() == 0) destinations[0] = PeerBuffer<uint4>(call, peer, kReceivedRows) + first;
      copies.Add({static_cast<const uint4*>(params.x) + first}, 1, destinations, {});
    }
  }
  copies.Finish();
}

// Called by the last block, with the outcome of all blocks. Signals this rank's rows as one chunk,
// and waits for all ranks' chunks. The first warp returns the outcome of the call.
__device__ Outcome WaitForRows(const CallParams& call, const RoleContext& role, uint64_t sequence,
                               Outcome outcome) {
  if (role.Warp() == 0 && outcome == Outcome::kArrived) {
    // The release covers the rows of all blocks, which FinishBlock has ordered before it.
    SignalChunk(call, WaitPoint::kChunk, 0, sequence);             // SIGNAL_CHUNK
    outcome = WaitForChunk(call, WaitPoint::kChunk, 0, sequence);  // WAIT_CHUNK
  }
  role.Sync();  // before the recorded failure is reset
  return outcome;
}

}  // namespace

__global__ void __launch_bounds__(kDispatchThreads, 1)
    BulkCopyCeilingKernel(const __grid_constant__ BulkCopyCeilingParams params) {
  const ProfileKernel profile(ProfiledKernel::kBulkCopyCeiling);
  const CallParams& call = params.call;
  __shared__ RoleScratch scratch;
  const RoleContext role = RoleContext::WholeBlock(&scratch);
  const uint64_t sequence = BeginCall(call, role);
  if (sequence == 0) {
    if (role.Thread() == 0) *params.status = static_cast<int32_t>(Outcome::kConcurrent);
    return;
  }
  const int ticket = NextTicket(&call.control->progress.block_tickets, role);
  if (HasWorkspace(call)) SignalEntryOnFirstTicket(call, sequence, ticket, false, role);
  const Outcome outcome = WaitForEntry(call, sequence, role);
  if (outcome == Outcome::kArrived) SendRows(params, role);
  // The rows are performed at system scope before the blocks are counted.
  if (LaneIndex() == 0) FenceSystem();
  const BlockEnd end = FinishBlock(call, role, outcome);
  if (!end.is_last) return;
  const Outcome failure = WaitForRows(call, role, sequence, KernelOutcome(call, role, end));
  if (role.Thread() == 0) *params.status = static_cast<int32_t>(failure);
  FinishCall(call, role, sequence);
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

const void* BulkCopyCeilingKernelAddress() {
  return reinterpret_cast<const void*>(BulkCopyCeilingKernel);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
