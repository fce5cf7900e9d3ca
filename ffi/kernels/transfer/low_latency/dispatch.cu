// Low-latency dispatch in one kernel (low_latency/layout.h). In every block
//
//   1. the last kCountingWarps warps collect and count the assignments of all ranks. The others
//      take items: packets of assignments, pushed to all ranks, and segments of tokens, pushed to
//      the ranks that they go to;
//   2. all warps compute the plan (BlockPlan), each block for itself;
//   3. warps expand segments into rows as flags arrive, and fill the rows that come from no token.
//
// Shared memory: the BlockPlan.
#include "ffi/device/protocol/kernel_end.cuh"
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/transfer/dispatch/row_placement.cuh"
#include "ffi/device/transfer/low_latency/block_plan.cuh"
#include "ffi/device/transfer/low_latency/push.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

// Sends packets to all ranks, and tokens to the ranks of their experts.
__device__ void SendByIds(const LowLatencyDispatchParams& params, const EagerBuffers& eager,
                          uint64_t sequence, SenderStart& start) {
  const CallParams& call = params.dispatch.tokens.call;
  const int32_t* const ids = params.dispatch.topk_ids;
  const auto expert_of = [&](int assignment) { return ids[assignment]; };
  const auto is_for = [&](int peer, int assignment) {
    const int first_expert = peer * call.num_local_experts;
    return first_expert <= ids[assignment] &&
           ids[assignment] < first_expert + call.num_local_experts;
  };
  Push(params, eager, sequence, start, NumPacketItems(call.num_assignments()), expert_of, is_for,
       false);
}

// Called by one warp. Stores a segment of a token to all of its rows.
__device__ Outcome ExpandSegment(const LowLatencyDispatchParams& params, const EagerBuffers& eager,
                                 uint64_t sequence, const BlockPlan<kLowLatencyThreads>& block_plan,
                                 const RowPlacement& placement, int index) {
  const TokenParams& tokens = params.dispatch.tokens;
  const CallParams& call = tokens.call;
  const int rank = eager.rank();
  const int lane = LaneIndex();
  const SegmentItem item = params.segments.Item(index, params.num_ranks_divmod);
  const int source = call.RankAfter(rank, 1 + item.peer);
  const int segment = item.segment;
  const int token = item.token;
  Route routes[1] = {{-1, 0}};
  if (lane < call.top_k) routes[0] = block_plan.AssignmentRoute(source, token * call.top_k + lane);
  const RowPlacement::PlacedToken<1> placed = placement.Place(source, routes);
  const int source_row = source * call.num_tokens + token;
  if (segment == 0) {
    placement.Write(source, token, placed);
    const int32_t row = placed.found.rows[0];
    if (tokens.has_weights && row >= 0) {
      const AssignmentPacket* const packets = eager.Local().packets() + source_row * call.top_k;
      tokens.row_weights[row] = LoadGlobalNoAllocate(&packets[lane].weight);
    }
  }
  if (placed.found.assignments == 0) return Outcome::kArrived;
  RowSource from = OperandRow(tokens, token);
  if (source != rank) {
    const uint64_t* const flag =
        &eager.Local().flags()[source_row * params.segments.count() + segment];
    const Outcome outcome = WaitForSegments(call, sequence, [&] {  // WAIT_SEGMENT
      return static_cast<uint32_t>(LoadAcquireSystem(flag) == eager.tag() ? kMaxRanks : source);
    });
    if (outcome != Outcome::kArrived) return outcome;
    from = {eager.Local().rows() + int64_t{source_row} * call.wire_vectors};
  }
  SegmentCopy copy(params.segments, segment, call.result_vectors, call.num_scale_words);
  copy.Load(call, from);
#pragma unroll 1
  for (auto left = static_cast<uint32_t>(placed.found.assignments); left != 0; left &= left - 1) {
    const int32_t row = placed.found.Row(__ffs(left) - 1);
    copy.Store(RowAddress(tokens, row), RowScales(tokens, row));
  }
  return Outcome::kArrived;
}

// Called by all warps. Expands all segments, then fills the rows that come from no token, in a
// static order.
__device__ Outcome ExpandAndFill(const LowLatencyDispatchParams& params, const RoleContext& role,
                                 const EagerBuffers& eager, uint64_t sequence,
                                 const BlockPlan<kLowLatencyThreads>& block_plan) {
  const CallParams& call = params.dispatch.tokens.call;
  const PlanResults plan = block_plan.quotas().PlanWithGroups(params.dispatch.plan);
  const RowPlacement placement(call, plan, block_plan.quotas(), eager.rank());
  const int num_items = call.num_all_tokens() * params.segments.count();
  const int num_warps = role.num_blocks * (kLowLatencyThreads / 32);
  int index = role.GridWarp();
  {
    const ProfileSpan span(SpanKind::kExpand);
#pragma unroll 1
    for (; index < num_items; index += num_warps) {
      const Outcome outcome = ExpandSegment(params, eager, sequence, block_plan, placement, index);
      if (outcome != Outcome::kArrived) return outcome;
    }
  }
  const auto next_item = [&] {
    const int item = index - num_items;
    index += num_warps;
    return item;
  };
  const int32_t end = plan.row_offsets[call.num_local_experts];
  FillEmptyRows(params.dispatch.tokens, sequence, end, next_item, [&](int row) {
    if (!IsEmptyRow(call, plan, row)) return false;
    WriteRowSource(plan, row, -1, -1, -1, -1);
    return true;
  });
  return Outcome::kArrived;
}

}  // namespace

__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    LowLatencyDispatchKernel(const __grid_constant__ LowLatencyDispatchParams params) {
  const ProfileKernel profile(ProfiledKernel::kLowLatencyDispatch,
                              1u | 1u << kLowLatencyThreads / 32 - kCountingWarps);
  const TokenParams& tokens = params.dispatch.tokens;
  const CallParams& call = tokens.call;
  __shared__ RoleScratch scratch;
  const RoleContext role = RoleContext::WholeBlock(&scratch);
  ClaimRequest claim(call, role);
  SenderStart start(call, !BlockPlan<kLowLatencyThreads>::IsCounter(role));
  const uint64_t sequence = claim.Await();
  if (sequence == 0) {
    return WriteSafeResults(tokens, params.dispatch.plan, Outcome::kConcurrent, role.GridThreads());
  }
  if (claim.MetHost()) start.LoadAbortWord(call);
  const EagerBuffers eager(call, sequence);
  BlockPlan<kLowLatencyThreads> block_plan(call, role, params.ranges, params.dispatch.row_align,
                                           eager.rank());
  auto outcome = Outcome::kArrived;  // this warp's
  if (HasWorkspace(call)) {
    if (block_plan.IsCounter(role)) {
      outcome = block_plan.Collect(eager, sequence);
    } else {
      SendByIds(params, eager, sequence, start);
    }
    if (!__syncthreads_or(outcome != Outcome::kArrived)) {
      block_plan.Compute();
      role.Sync();
      if (role.block == 0) {
        block_plan.quotas().WriteGroups(params.dispatch.plan, role.BlockThreads());
      }
      outcome = ExpandAndFill(params, role, eager, sequence, block_plan);
    }
  }
  FinishLowLatencyCall(call, role, sequence, outcome, [&](Outcome failure) {
    WriteSafeResults(tokens, params.dispatch.plan, failure, role.BlockThreads());
  });
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

const void* LowLatencyDispatchKernelAddress() {
  return reinterpret_cast<const void*>(LowLatencyDispatchKernel);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
