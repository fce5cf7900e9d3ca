// What the links can do, as a yardstick: rows from here to all other ranks' workspaces by the copy
// engine, each to one place.
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/protocol/work_items.cuh"
#include "ffi/device/transfer/row_copies.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

// Row t of rank r goes to rank r + 1 + t % (R - 1), into row t there: no two ranks write the same.
__device__ void SendRows(const BulkCopyCeilingParams& stage) {
  const Call& call = stage.call;
  const int warp = threadIdx.x / 32;
  if (warp >= stage.ring.num_warps) return;
  const int num_others = max(call.num_ranks - 1, 1);
  const int stride = stage.ring.num_warps * gridDim.x;
  RowCopies copies(stage.ring, warp, call.row_vectors);
  copies.Begin();
  for (int repeat = 0; repeat < stage.repeats; ++repeat) {
    for (int row = warp * gridDim.x + blockIdx.x; row < call.num_tokens; row += stride) {
      const int peer = (call.control->rank + 1 + row % num_others) % call.num_ranks;
      const int64_t first = int64_t{row} * call.row_vectors;
      uint4* places[2] = {};
      if (threadIdx.x % 32 == 0) places[0] = call.Of<uint4>(peer, kReceivedRows) + first;
      copies.Add(static_cast<const uint4*>(stage.x) + first, 1, places);
    }
  }
  copies.Finish();
}

// As if a rank's rows were one chunk: the call ends when those of all ranks have arrived. By the
// last block; `outcome` is that of all blocks, and the first warp returns that of the call.
__device__ Outcome AwaitRows(const Call& call, uint64_t sequence, Outcome outcome) {
  if (threadIdx.x < 32 && outcome == Outcome::kArrived) {
    // Its release orders all blocks' rows before it, by CountBlock.
    SignalChunk(call, WaitPoint::kChunk, 0, sequence);             // SIGNAL_CHUNK
    outcome = WaitForChunk(call, WaitPoint::kChunk, 0, sequence);  // WAIT_CHUNK
  }
  __syncthreads();  // what it has noted is reset after it
  return outcome;
}

}  // namespace

__global__ void __launch_bounds__(kDispatchThreads, 1)
    BulkCopyCeilingKernel(const __grid_constant__ BulkCopyCeilingParams stage) {
  const Call& call = stage.call;
  const uint64_t sequence = CurrentSequence(call);
  const ThreadGroup threads = ThreadGroup::Block();
  const int ticket = NextTicket(&call.control->progress.tickets, threads);
  if (HasWorkspace(call)) SignalEntryOnFirstTicket(call, sequence, ticket, false, threads);
  const Outcome outcome = WaitForEntry(call, sequence, threads);
  if (outcome == Outcome::kArrived) SendRows(stage);
  // The rows are performed at system scope before the blocks are counted.
  if (threadIdx.x % 32 == 0) FenceSystem();
  const BlockEnd end = CountBlock(call, outcome);
  if (!end.is_last) return;
  const Outcome failure = AwaitRows(call, sequence, FailureOutcome(call, end));
  FinishCall(call, sequence);
  if (threadIdx.x == 0) *stage.status = static_cast<int32_t>(failure);
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* BulkCopyCeilingKernelAddress() {
  return reinterpret_cast<const void*>(BulkCopyCeilingKernel);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
