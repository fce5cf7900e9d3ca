// combine in one kernel. Every block
//
//   1. takes prologue items: ranges of the plan, which it inverts, so that each token finds its
//      rows;
//   2. waits for entry;
//   3. takes items of CombineSchedule, one per warp. A send item sums this rank's rows of a token,
//      or a segment of them, and stores the partial sum to the token's rank. A reduce item, some
//      chunks later, reduces the partial sums of a token of this rank.
//
// Shared memory: a SumPipeline per warp.
#include "ffi/device/protocol/kernel_end.cuh"
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/protocol/work_items.cuh"
#include "ffi/device/transfer/combine/partial_sums.cuh"
#include "ffi/device/transfer/combine/schedule.h"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

constexpr int kSumStages = 8;
static_assert(SumPipeline<kSumStages>::kBytes == kSumPipelineBytes);

// Called by one warp. Sums this rank's rows of a token, and sends the partial sum.
template <typename Sum>
__device__ void SendItem(const CombineParams& params, int32_t end, const CombineItem& item,
                         Sum sum) {
  const CallParams& call = params.call;
  SendPartialSum(params, FindRows(call, params.plan, end, item.rank, item.token),
                 {item.token, item.first, item.end},
                 PeerBuffer<uint4>(call, item.rank, kReceivedRows),
                 PeerBuffer<float>(call, item.rank, kAssignmentScalars), sum);
}

// Called by one warp. Reduces the partial sums of a token of this rank.
template <typename Sum>
__device__ void ReduceItem(const CombineParams& params, const CombineItem& item,
                           const KeptAssignments<2>& kept, Sum sum) {
  const CallParams& call = params.call;
  ReducePartialSums(params, kept, {item.token, item.first, item.end},
                    call.LocalBuffer<uint4>(kReceivedRows),
                    call.LocalBuffer<float>(kAssignmentScalars), sum);
}

// Called by one warp after SendItem. The last item of a chunk signals the tokens' rank.
__device__ void FinishSend(const CombineParams& params, const CombineItem& item,
                           uint64_t sequence) {
  ControlBlock* const control = params.call.control;
  __syncwarp();
  if (LaneIndex() != 0) return;
  // As in FinishItem: this warp's stores are performed at system scope before they are counted.
  FenceSystem();
  const uint32_t before =
      AddAcquireReleaseDevice(&control->progress.chunk_items_finished[item.rank][item.chunk], 1);
  if (before + 1 != static_cast<uint32_t>(params.schedule.NumSends(item.chunk))) return;
  // SIGNAL_CHUNK
  StoreChunkFlag(control, item.rank, WaitPoint::kChunk, item.chunk, sequence);
}

// Called by all warps. Runs items until there are no more.
template <typename Type>
__device__ Outcome CombineTokens(const CombineParams& params, const RoleContext& role,
                                 uint64_t sequence) {
  const CallParams& call = params.call;
  Progress& progress = call.control->progress;
  const int32_t end = EndOfRows(call, params.plan);
  const SumPipeline<kSumStages> pipeline(role);
  const auto sum = [&](const SumTerms<2>& terms, int first, int end, PeerPointer<uint4> to) {
    SumRows<Type>(pipeline, terms, first, end, to);
  };
  int ticket;
  while ((ticket = NextWarpTicket(&progress.warp_tickets)) < params.schedule.num_items()) {
    const CombineItem item = params.schedule.Item(ticket, call.control->rank);
    if (item.token < 0) continue;
    if (item.is_reduce) {
      const KeptAssignments<2> kept(params, item.token);
      // WAIT_LOCAL: lower tickets of this device.
      const uint64_t* const mine = &call.control->inbox->chunks_sent[item.rank][item.chunk];
      {
        const ProfileSpan span(SpanKind::kWaitItems);
        while (LoadAcquireDevice(mine) < sequence) __nanosleep(20);
      }
      // WAIT_CHUNK
      const Outcome outcome = WaitForChunk(call, WaitPoint::kChunk, item.chunk, sequence);
      if (outcome != Outcome::kArrived) return outcome;
      const ProfileSpan span(SpanKind::kReduce);
      ReduceItem(params, item, kept, sum);
    } else {
      const ProfileSpan span(SpanKind::kSendSums);
      SendItem(params, end, item, sum);
      FinishSend(params, item, sequence);
    }
  }
  return Outcome::kArrived;
}

}  // namespace

template <typename Type>
__global__ void __launch_bounds__(kCombineThreads, 2)
    CombineKernel(const __grid_constant__ CombineParams params) {
  const ProfileKernel profile(ProfiledKernel::kCombine);
  const CallParams& call = params.call;
  Progress& progress = call.control->progress;
  __shared__ RoleScratch scratch;
  const RoleContext role = RoleContext::WholeBlock(&scratch);
  const uint64_t sequence = BeginCall(call, role);
  if (sequence == 0) return FillWithNan(params, role.GridThreads());
  const bool poisoned = *params.plan.status != 0;

  const bool has_workspace = HasWorkspace(call);
  for (int ticket;
       (ticket = NextTicket(&progress.block_tickets, role)) < call.num_prologue_items;) {
    if (has_workspace) {
      // A poisoned rank sends no partial sums, so its peers must not reduce old ones.
      SignalEntryOnFirstTicket(call, sequence, ticket, poisoned, role);
      InvertRows(call, params.plan, ticket, call.num_prologue_items, role.BlockThreads());
    }
    FinishItem(&progress.items_finished, false, role);
  }
  // The barrier at the end of WaitForEntry makes the items' results visible to all threads.
  if (role.Thread() == 0) WaitForItems(&progress.items_finished, call.num_prologue_items);
  Outcome outcome = WaitForEntry(call, sequence, role);
  if (outcome == Outcome::kArrived && !poisoned) {
    outcome = CombineTokens<Type>(params, role, sequence);
  } else {
    FillWithNan(params, role.GridThreads());
  }
  const BlockEnd end = FinishBlock(call, role, outcome);
  if (!end.is_last) return;
  const Outcome failure = KernelOutcome(call, role, end);
  // After a poisoned peer all blocks have failed at WaitForEntry, and have written NaN.
  if (failure != Outcome::kArrived && failure != Outcome::kPoisoned) {
    FillWithNan(params, role.BlockThreads());
  }
  FinishCall(call, role, sequence);
}

template __global__ void CombineKernel<BFloat16>(const __grid_constant__ CombineParams params);
template __global__ void CombineKernel<Float16>(const __grid_constant__ CombineParams params);
template __global__ void CombineKernel<Float32>(const __grid_constant__ CombineParams params);

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

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
