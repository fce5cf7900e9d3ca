// Low-latency redispatch in one kernel (low_latency/layout.h). All warps
//
//   1. take items: packets of weights, pushed to all ranks, and segments of tokens, pushed to the
//      ranks that the plan names;
//   2. copy segments to rows as flags arrive, and fill the rows that come from no token.
#include "ffi/device/protocol/kernel_end.cuh"
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/transfer/dispatch/results.cuh"
#include "ffi/device/transfer/low_latency/planned_segments.cuh"
#include "ffi/device/transfer/low_latency/push.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

// Sends weights to all ranks, and tokens to the ranks that the plan names. With a poisoned plan all
// tokens go to all ranks. Flags are set even where a token has no row: a wrong plan gives wrong
// rows, but the receiver must not wait forever.
__device__ void SendAlongPlan(const LowLatencyRedispatchParams& params, const EagerBuffers& eager,
                              uint64_t sequence, SenderStart& start, bool poisoned) {
  const TokenParams& tokens = params.dispatch.tokens;
  const int num_packet_items =
      tokens.has_weights ? NumPacketItems(tokens.call.num_assignments()) : 0;
  const auto expert_of = [](int /*assignment*/) { return 0; };
  const auto is_for = [&](int peer, int assignment) {
    return poisoned || params.dispatch.plan.destination[assignment] == peer;
  };
  Push(params, eager, sequence, start, num_packet_items, expert_of, is_for, true);
}

// Called by one warp. Copies the segments of the first two lanes in `lanes`, and removes the two.
// These lanes poll for their own segments, so that both are waited for at once.
__device__ Outcome CopySegments(const LowLatencyRedispatchParams& params, const EagerBuffers& eager,
                                uint64_t sequence, const RowSegmentItem& mine, uint32_t* lanes) {
  const TokenParams& tokens = params.dispatch.tokens;
  const CallParams& call = tokens.call;
  const int rank = eager.rank();
  const EagerBuffers::LocalBuffers local = eager.Local();
  const uint32_t before = *lanes;
  const RowSegmentItem items[] = {Take(mine, lanes), Take(mine, lanes)};
  const bool polls = ((before ^ *lanes) >> (LaneIndex()) & 1) != 0;
  const bool has_weight = polls && tokens.has_weights && mine.segment == 0;
  const uint64_t* const flag =
      &local.flags()[params.top_k_divmod.Quotient(mine.assignment) * params.segments.count() +
                     mine.segment];
  uint64_t packed = 0;
  const Outcome outcome = WaitForSegments(call, sequence, [&] {  // WAIT_SEGMENT
    uint64_t tag = eager.tag();
    if (has_weight) LoadRelaxedSystem(&local.packets()[mine.assignment], &packed, &tag);
    bool has_arrived = tag == eager.tag();
    if (polls && mine.source != rank) has_arrived &= LoadAcquireSystem(flag) == eager.tag();
    return static_cast<uint32_t>(has_arrived ? kMaxRanks : mine.source);
  });
  if (outcome != Outcome::kArrived) return outcome;
  if (has_weight) {
    tokens.row_weights[mine.row] = __uint_as_float(static_cast<uint32_t>(packed >> 32));
  }
  const auto make_copy = [&](const RowSegmentItem& item) {
    const bool is_row = item.source >= 0;
    return SegmentCopy(params.segments, item.segment, is_row ? call.result_vectors : 0,
                       is_row ? call.num_scale_words : 0);
  };
  SegmentCopy copies[] = {make_copy(items[0]), make_copy(items[1])};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const RowSegmentItem& item = items[j];
    const bool is_local = item.source == rank;
    const int row =
        params.top_k_divmod.Quotient(item.assignment) - (is_local ? rank * call.num_tokens : 0);
    RowSource from = {local.rows() + int64_t{row} * call.wire_vectors};
    if (is_local) from = OperandRow(tokens, row);
    copies[j].Load(call, from);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    copies[j].Store(RowAddress(tokens, items[j].row), RowScales(tokens, items[j].row));
  }
  return Outcome::kArrived;
}

// Called by all warps. Copies all segments, then fills the rows that come from no token, in a
// static order.
__device__ Outcome CopyAndFill(const LowLatencyRedispatchParams& params, const RoleContext& role,
                               const EagerBuffers& eager, uint64_t sequence) {
  const TokenParams& tokens = params.dispatch.tokens;
  const PlanOperands& plan = params.dispatch.plan;
  return CopyPlannedRows(tokens, plan, params.segments, role, sequence,
                         role.num_blocks * (kLowLatencyThreads / 32),
                         [&](const RowSegmentItem& mine, uint32_t* lanes) {
                           return CopySegments(params, eager, sequence, mine, lanes);
                         });
}

}  // namespace

__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    LowLatencyRedispatchKernel(const __grid_constant__ LowLatencyRedispatchParams params) {
  const ProfileKernel profile(ProfiledKernel::kLowLatencyRedispatch);
  const TokenParams& tokens = params.dispatch.tokens;
  const CallParams& call = tokens.call;
  __shared__ RoleScratch scratch;
  const RoleContext role = RoleContext::WholeBlock(&scratch);
  ClaimRequest claim(call, role);
  SenderStart start(call, true);
  const int32_t plan_status = *params.dispatch.plan.status;
  const uint64_t sequence = claim.Await();
  if (sequence == 0) return FillWithNan(tokens, role.GridThreads());
  if (claim.MetHost()) start.LoadAbortWord(call);
  const EagerBuffers eager(call, sequence);
  Outcome outcome = PlanOutcome(call, role, plan_status);  // this warp's
  const bool poisoned = outcome != Outcome::kArrived;
  if (HasWorkspace(call)) {
    SendAlongPlan(params, eager, sequence, start, poisoned);
    if (!poisoned) outcome = CopyAndFill(params, role, eager, sequence);
  }
  FinishLowLatencyCall(call, role, sequence, outcome,
                       [&](Outcome) { FillWithNan(tokens, role.BlockThreads()); });
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

const void* LowLatencyRedispatchKernelAddress() {
  return reinterpret_cast<const void*>(LowLatencyRedispatchKernel);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
