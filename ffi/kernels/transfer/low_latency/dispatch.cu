// dispatch of few tokens in one kernel, see small.h:
//
//   push     handed out in order: choices go to all ranks, tokens to those that they visit
//   number   meanwhile each block counts the choices of all ranks, and finds all rows by itself
//   place    tokens that are here go to their rows; rows that come from no token are filled
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/transfer/low_latency/block_plan.cuh"
#include "ffi/device/transfer/low_latency/push.cuh"
#include "ffi/device/transfer/row_placement.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

// Choices to all ranks, tokens to those that have an expert of one of their choices.
__device__ void PushByIds(const LowLatencyDispatchParams& stage, const EagerBuffers& halves,
                          uint64_t sequence) {
  const Call& call = stage.dispatch.tokens.call;
  const int32_t* const ids = stage.dispatch.topk_ids;
  const auto expert_of = [&](int choice) { return ids[choice]; };
  const auto is_for = [&](int peer, int choice) {
    const int first_expert = peer * call.num_local;
    return first_expert <= ids[choice] && ids[choice] < first_expert + call.num_local;
  };
  Push(stage, halves, sequence, NumPacketItems(call.num_assignments()), expert_of, is_for, false);
}

// A piece of a token, to its rows. By one warp.
__device__ Outcome PlaceRow(const LowLatencyDispatchParams& stage, const EagerBuffers& halves,
                            uint64_t sequence, const BlockPlan<kLowLatencyThreads>& small_plan,
                            const RowPlacement& placing, int number) {
  const TokenParams& tokens = stage.dispatch.tokens;
  const Call& call = tokens.call;
  const int rank = halves.rank();
  const int lane = threadIdx.x % 32;
  const SegmentItem part = stage.pieces.At(number, stage.by_num_ranks);
  const int source = call.RankAfter(rank, 1 + part.peer);
  const int piece = part.piece;
  const int token = part.token;
  Route routes[1] = {{-1, 0}};
  if (lane < call.top_k) routes[0] = small_plan.RouteOf(source, token * call.top_k + lane);
  const RowPlacement::Token<1> placed = placing.Place(source, routes);
  const int place = source * call.num_tokens + token;
  if (piece == 0) {
    placing.Write(source, token, placed);
    const int32_t row = placed.found.rows[0];
    if (tokens.has_weights && row >= 0) {
      const AssignmentPacket* const packets = halves.Mine().packets() + place * call.top_k;
      tokens.row_weights[row] = LoadGlobalNoAllocate(&packets[lane].weight);
    }
  }
  if (placed.found.choices == 0) return Outcome::kArrived;
  const uint4* from = static_cast<const uint4*>(tokens.x) + int64_t{token} * call.row_vectors;
  if (source != rank) {
    const uint64_t* const flag = &halves.Mine().flags()[place * stage.pieces.count() + piece];
    const Outcome outcome = WaitForSegments(call, sequence, [&] {  // WAIT_SEGMENT
      return static_cast<uint32_t>(LoadAcquireSystem(flag) == halves.tag() ? kMaxRanks : source);
    });
    if (outcome != Outcome::kArrived) return outcome;
    from = halves.Mine().rows() + int64_t{place} * call.row_vectors;
  }
  SegmentCopy copy(stage.pieces, piece, call.row_vectors);
  copy.Load(from);
#pragma unroll 1
  for (auto left = static_cast<uint32_t>(placed.found.choices); left != 0; left &= left - 1) {
    const int32_t row = placed.found.RowOf(__ffs(left) - 1);
    copy.Store(static_cast<uint4*>(tokens.rows) + int64_t{row} * call.row_vectors);
  }
  return Outcome::kArrived;
}

// Tokens piece by piece, and then the rows that come from none. By all warps, each in its turn.
__device__ Outcome PlaceRows(const LowLatencyDispatchParams& stage, const EagerBuffers& halves,
                             uint64_t sequence, const BlockPlan<kLowLatencyThreads>& small_plan) {
  const Call& call = stage.dispatch.tokens.call;
  const PlanResults plan = small_plan.quotas().WithGroups(stage.dispatch.plan);
  const RowPlacement placing(call, plan, small_plan.quotas(), halves.rank());
  const int num_parts = call.num_all_tokens() * stage.pieces.count();
  const int num_warps = static_cast<int>(gridDim.x) * (kLowLatencyThreads / 32);
  int number = static_cast<int>(threadIdx.x / 32 * gridDim.x + blockIdx.x);
#pragma unroll 1
  for (; number < num_parts; number += num_warps) {
    const Outcome outcome = PlaceRow(stage, halves, sequence, small_plan, placing, number);
    if (outcome != Outcome::kArrived) return outcome;
  }
  const auto next_fill = [&] {
    const int fill = number - num_parts;
    number += num_warps;
    return fill;
  };
  FillEmptyRows(stage.dispatch.tokens, plan.row_offsets[call.num_local], next_fill, [&](int row) {
    if (!IsEmptyRow(call, plan, row)) return false;
    SetRow(plan, row, -1, -1, -1, -1);
    return true;
  });
  return Outcome::kArrived;
}

}  // namespace

__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    LowLatencyDispatchKernel(const __grid_constant__ LowLatencyDispatchParams stage) {
  const TokenParams& tokens = stage.dispatch.tokens;
  const Call& call = tokens.call;
  const uint64_t sequence = CurrentSequence(call);
  const EagerBuffers halves(call, sequence);
  BlockPlan<kLowLatencyThreads> small_plan(call, stage.stretches, stage.dispatch.row_align,
                                           halves.rank());
  auto outcome = Outcome::kArrived;  // of this thread's warp
  if (HasWorkspace(call)) {
    if (small_plan.IsCounter()) {
      outcome = small_plan.Collect(halves, sequence);
    } else {
      PushByIds(stage, halves, sequence);
    }
    if (!__syncthreads_or(outcome != Outcome::kArrived)) {
      small_plan.Number();
      __syncthreads();
      if (blockIdx.x == 0) {
        small_plan.quotas().WriteGroups(stage.dispatch.plan, ThreadGroup::Block());
      }
      outcome = PlaceRows(stage, halves, sequence, small_plan);
    }
  }
  const Outcome failure = FinishLowLatencyCall(call, sequence, outcome);
  if (failure == Outcome::kArrived) return;
  WriteSafeGroups(call, stage.dispatch.plan, failure);
  WriteSafeResults(tokens, stage.dispatch.plan, ThreadGroup::Block());
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* LowLatencyDispatchKernelAddress() {
  return reinterpret_cast<const void*>(LowLatencyDispatchKernel);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
