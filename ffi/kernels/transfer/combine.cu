// combine in one kernel. Its parts are handed out in order:
//
//   parts of the plan   inverted, so that each token finds its rows
//   tokens              of all ranks, chunk by chunk, in pieces if there are few: their rows here
//                       are summed and sent to their rank; and, some chunks later, those of this
//                       rank, which are added up from what all ranks sent
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/protocol/work_items.cuh"
#include "ffi/device/transfer/combine_schedule.h"
#include "ffi/device/transfer/partial_sums.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

constexpr int kSumStages = 8;
static_assert(SumPipeline<kSumStages>::kBytes == kSumPipelineBytes);

// This rank's rows of a token of a rank, weighted and summed, to the slot there that is this
// rank's: a piece of them. By one warp.
template <typename Type>
__device__ void SendPiece(const CombineParams& stage, int32_t end, const CombineItem& ticket) {
  const Call& call = stage.call;
  SendPartialSum(stage, RowsOfToken(call, stage.plan, end, ticket.rank, ticket.token),
                 {ticket.token, ticket.first, ticket.end},
                 call.Of<uint4>(ticket.rank, kReceivedRows),
                 call.Of<float>(ticket.rank, kAssignmentScalars), SumRows<Type, kSumStages, 2>);
}

// Adds up what the ranks sent for a token of this rank, in rank order: a piece of it. By one warp.
template <typename Type>
__device__ void AddPiece(const CombineParams& stage, const CombineItem& ticket,
                         const KeptAssignments<2>& choices) {
  const Call& call = stage.call;
  ReducePartialSums(stage, choices, {ticket.token, ticket.first, ticket.end},
                    call.Of<uint4>(ticket.rank, kReceivedRows),
                    call.Of<float>(ticket.rank, kAssignmentScalars), SumRows<Type, kSumStages, 2>);
}

// This warp's part of a chunk of a rank's tokens is stored there; the last one says so.
__device__ void FinishReduce(const CombineParams& stage, const CombineItem& ticket,
                             uint64_t sequence) {
  ControlBlock* const control = stage.call.control;
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  // As in FinishItem: this warp's stores are performed at system scope before they are counted.
  FenceSystem();
  const uint32_t before =
      AddAcquireReleaseDevice(&control->progress.chunks_finished[ticket.rank][ticket.chunk], 1);
  if (before + 1 != static_cast<uint32_t>(stage.tickets.TicketsOf(ticket.chunk))) return;
  // SIGNAL_CHUNK
  StoreReleaseSystem(&control->peers[ticket.rank].control->chunks_sent[control->rank][ticket.chunk],
                     sequence);
}

// By all warps, until there are no more tickets.
template <typename Type>
__device__ Outcome CombineTokens(const CombineParams& stage, uint64_t sequence) {
  const Call& call = stage.call;
  Progress& progress = call.control->progress;
  const int32_t end = EndOfRows(call, stage.plan);
  int number;
  while ((number = NextWarpTicket(&progress.warp_tickets)) < stage.tickets.Count()) {
    const CombineItem ticket = stage.tickets.At(number, call.control->rank);
    if (ticket.token < 0) continue;
    if (ticket.is_sum) {
      const KeptAssignments<2> choices(stage, ticket.token);
      // WAIT_LOCAL: lower tickets of this device.
      const uint64_t* const mine = &call.control->chunks_sent[ticket.rank][ticket.chunk];
      while (LoadAcquireDevice(mine) < sequence) __nanosleep(20);
      // WAIT_CHUNK
      const Outcome outcome = WaitForChunk(call, WaitPoint::kChunk, ticket.chunk, sequence);
      if (outcome != Outcome::kArrived) return outcome;
      AddPiece<Type>(stage, ticket, choices);
    } else {
      SendPiece<Type>(stage, end, ticket);
      FinishReduce(stage, ticket, sequence);
    }
  }
  return Outcome::kArrived;
}

}  // namespace

template <typename Type>
__global__ void __launch_bounds__(kCombineThreads, 2)
    CombineKernel(const __grid_constant__ CombineParams stage) {
  const Call& call = stage.call;
  Progress& progress = call.control->progress;
  const uint64_t sequence = CurrentSequence(call);
  const bool poisoned = *stage.plan.status != 0;

  const bool has_workspace = HasWorkspace(call);
  const ThreadGroup threads = ThreadGroup::Block();
  for (int ticket; (ticket = NextTicket(&progress.tickets, threads)) < call.num_parts;) {
    if (has_workspace) {
      // A poisoned rank sends no sums, so its peers must not add up what their slots happen to
      // hold.
      SignalEntryOnFirstTicket(call, sequence, ticket, poisoned, threads);
      IndexRows(call, stage.plan, ticket, call.num_parts, threads);
    }
    FinishItem(&progress.finished, false, threads);
  }
  WaitForItemsOfBlock(&progress.finished, call.num_parts);
  Outcome outcome = WaitForEntry(call, sequence, threads);
  if (outcome == Outcome::kArrived && !poisoned) {
    outcome = CombineTokens<Type>(stage, sequence);
  } else {
    FillWithNan(stage, ThreadGroup::Grid());
  }
  const BlockEnd end = CountBlock(call, outcome);
  if (!end.is_last) return;
  const Outcome failure = FailureOutcome(call, end);
  FinishCall(call, sequence);
  // Of a poisoned peer all blocks have heard at the gate.
  if (failure == Outcome::kArrived || failure == Outcome::kPoisoned) return;
  FillWithNan(stage, ThreadGroup::Block());
}

template __global__ void CombineKernel<BFloat16>(const __grid_constant__ CombineParams stage);
template __global__ void CombineKernel<Float16>(const __grid_constant__ CombineParams stage);
template __global__ void CombineKernel<Float32>(const __grid_constant__ CombineParams stage);

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* CombineKernelAddress(RowType type) {
  switch (type) {
    case RowType::kBFloat16:
      return reinterpret_cast<const void*>(CombineKernel<BFloat16>);
    case RowType::kFloat16:
      return reinterpret_cast<const void*>(CombineKernel<Float16>);
    case RowType::kFloat32:
      return reinterpret_cast<const void*>(CombineKernel<Float32>);
  }
  return nullptr;
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
