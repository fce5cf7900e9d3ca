// combine of few tokens in one kernel, see small.h:
//
//   index   each block inverts the plan by itself
//   push    handed out in order: the sums of this rank's rows go to the tokens' ranks
//   add     what all ranks sent for the tokens of this one
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/protocol/work_items.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/transfer/low_latency/row_segments.cuh"
#include "ffi/device/transfer/partial_sums.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

constexpr int kLowLatencySumStages = 4;
static_assert(SumPipeline<kLowLatencySumStages>::kBytes == kLowLatencySumPipelineBytes);

// Of both kinds: its instructions are fetched once.
template <typename Type>
__device__ __noinline__ void SumSegment(const SumTerms<1>& terms, int first, int end, uint4* to) {
  SumRows<Type, kLowLatencySumStages, 1>(terms, first, end, to);
}

// The row of each choice of each rank's tokens here, -1 if there is none: [R][T][K], in shared
// memory behind the warps' rings. By all threads of a block.
__device__ const int32_t* IndexBlock(const LowLatencyCombineParams& stage) {
  const Call& call = stage.combine.call;
  int32_t* const rows = reinterpret_cast<int32_t*>(
      DynamicSharedMemory() + kLowLatencyThreads / 32 * kLowLatencySumPipelineBytes);
#pragma unroll 1
  for (int i = threadIdx.x; i < call.num_ranks * call.num_assignments(); i += kLowLatencyThreads) {
    rows[i] = -1;
  }
  __syncthreads();
  const int32_t end = EndOfRows(call, stage.combine.plan);
#pragma unroll 1
  for (int row = threadIdx.x; row < end; row += kLowLatencyThreads) {
    int choice;
    if (SourceOfRow(call, stage.combine.plan, row, &choice)) rows[choice] = row;
  }
  __syncthreads();
  return rows;
}

__device__ RowSegment SegmentOf(const LowLatencyCombineParams& stage, const SegmentItem& part) {
  return {part.token, stage.pieces.FirstOf(part.piece),
          stage.pieces.EndOf(part.piece, stage.combine.call.row_vectors)};
}

// Where the flags of all ranks stand for a piece of a token.
__device__ int FlagOf(const LowLatencyCombineParams& stage, const SegmentItem& part) {
  return (part.token * stage.pieces.count() + part.piece) * stage.combine.call.num_ranks;
}

// A piece of what this rank has for a token of a rank, itself among them. The flag comes even if
// that is nothing: a plan may be wrong, and nobody shall wait for ever. By one warp.
template <typename Type>
__device__ void PushSum(const LowLatencyCombineParams& stage, const EagerBuffers& halves,
                        const int32_t* rows, int number, SegmentFlags* flags) {
  const Call& call = stage.combine.call;
  const int rank = halves.rank();
  const SegmentItem part = stage.pieces.At(number, stage.by_num_ranks);
  const int owner = call.RankAfter(rank, 1 + part.peer);
  const int k = threadIdx.x % 32;
  const int first = (owner * call.num_tokens + part.token) * call.top_k;
  TokenRowsPerLane<1> found;
  found.rows[0] = k < call.top_k ? rows[first + k] : -1;
  found.choices = __ballot_sync(kFullWarp, found.rows[0] >= 0);
  SendPartialSum(stage.combine, found, SegmentOf(stage, part), halves.Of(owner).rows(),
                 halves.Of(owner).scalars(), SumSegment<Type>);
  flags->Add(&halves.Of(owner).flags()[FlagOf(stage, part) + rank]);
}

// All that this rank sends. Nobody waits here for others, so each warp asks for its next part
// ahead.
template <typename Type>
__device__ void Push(const LowLatencyCombineParams& stage, const EagerBuffers& halves,
                     uint64_t sequence, bool poisoned) {
  const Call& call = stage.combine.call;
  const int num_parts = call.num_all_tokens() * stage.pieces.count();
  WarpTicketPrefetch tickets(&call.control->progress.warp_tickets);
  SegmentFlags flags(halves);
  InjectDelay(call, sequence, 4);
  const bool may_push = MayStoreToPeers(call);
  const int32_t* const rows = IndexBlock(stage);
  if (!may_push) return;
#pragma unroll 1
  for (int number; (number = tickets.Next()) < num_parts;) {
    if (!poisoned) PushSum<Type>(stage, halves, rows, number, &flags);
    // With the first part: peers that run another call shall know, or have nothing to wait for.
    if (number == 0) SignalEntry(call, sequence, poisoned);
  }
  flags.Signal();
}

// What the ranks sent for this one's tokens. By all warps, each in its turn.
template <typename Type>
__device__ Outcome ReduceTokens(const LowLatencyCombineParams& stage, const EagerBuffers& halves,
                                uint64_t sequence) {
  const Call& call = stage.combine.call;
  const int num_parts = call.num_tokens * stage.pieces.count();
  const int num_warps = gridDim.x * (kLowLatencyThreads / 32);
#pragma unroll 1
  for (int number = threadIdx.x / 32 * gridDim.x + blockIdx.x; number < num_parts;
       number += num_warps) {
    const SegmentItem part = stage.pieces.At(number, FastDivmod());
    const KeptAssignments<1> choices(stage.combine, part.token);
    const uint64_t* const flags = &halves.Mine().flags()[FlagOf(stage, part)];
    const Outcome outcome = WaitForSegments(call, sequence, [&] {  // WAIT_SEGMENT
      uint32_t missing = kMaxRanks;
#pragma unroll 1
      for (int peer = threadIdx.x % 32; peer < call.num_ranks; peer += 32) {
        if (LoadAcquireSystem(&flags[peer]) != halves.tag()) {
          missing = min(missing, static_cast<uint32_t>(peer));
        }
      }
      return missing;
    });
    if (outcome != Outcome::kArrived) return outcome;
    ReducePartialSums(stage.combine, choices, SegmentOf(stage, part), halves.Mine().rows(),
                      halves.Mine().scalars(), SumSegment<Type>);
  }
  return Outcome::kArrived;
}

}  // namespace

template <typename Type>
__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    LowLatencyCombineKernel(const __grid_constant__ LowLatencyCombineParams stage) {
  const Call& call = stage.combine.call;
  const uint64_t sequence = CurrentSequence(call);
  const EagerBuffers halves(call, sequence);
  Outcome outcome = PlanOutcome(call, stage.combine.plan.status);  // of this thread's warp
  const bool poisoned = outcome != Outcome::kArrived;
  if (HasWorkspace(call)) {
    Push<Type>(stage, halves, sequence, poisoned);
    if (!poisoned) outcome = ReduceTokens<Type>(stage, halves, sequence);
  }
  const Outcome failure = FinishLowLatencyCall(call, sequence, outcome);
  if (failure != Outcome::kArrived) FillWithNan(stage.combine, ThreadGroup::Block());
}

template __global__ void LowLatencyCombineKernel<BFloat16>(
    const __grid_constant__ LowLatencyCombineParams stage);
template __global__ void LowLatencyCombineKernel<Float16>(
    const __grid_constant__ LowLatencyCombineParams stage);
template __global__ void LowLatencyCombineKernel<Float32>(
    const __grid_constant__ LowLatencyCombineParams stage);

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* LowLatencyCombineKernelAddress(RowType type) {
  switch (type) {
    case RowType::kBFloat16:
      return reinterpret_cast<const void*>(LowLatencyCombineKernel<BFloat16>);
    case RowType::kFloat16:
      return reinterpret_cast<const void*>(LowLatencyCombineKernel<Float16>);
    case RowType::kFloat32:
      return reinterpret_cast<const void*>(LowLatencyCombineKernel<Float32>);
  }
  return nullptr;
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
