// redispatch in one kernel: dispatch with a known plan, without ids and counts. A block has
// kDispatchThreads threads of expand warps, and send warps.
//
//   expand warps   1. take prologue items: ranges of the weights, which they send after
//                     WaitForEntry, then ranges of the plan, which they invert, so that each token
//                     finds its rows;
//                  2. wait for the first chunk of all ranks;
//                  3. expand tokens of all ranks into rows as chunks arrive (TokenExpansion), and
//                     fill the rows that come from no token.
//   send warps     after WaitForEntry, send this rank's tokens chunk by chunk (TokenSender).
//
// Shared memory: the pipelines of both roles.
#include "ffi/device/protocol/kernel_end.cuh"
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/transfer/dispatch/planned_rows.cuh"
#include "ffi/device/transfer/dispatch/token_expansion.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

// Called by the expand warps. In a poisoned plan no token has a row.
__device__ Outcome ExpandAndFill(const RedispatchParams& params, const DispatchRoles& roles,
                                 uint64_t sequence, bool poisoned) {
  const RoleContext& role = roles.expand;
  const ThreadGroup threads = role.BlockThreads();
  const TokenParams& tokens = params.tokens;
  const CallParams& call = tokens.call;
  Progress& progress = call.control->progress;
  const bool has_workspace = HasWorkspace(call);
  int ticket = NextTicket(&progress.block_tickets, role);
  if (has_workspace) SignalEntryOnFirstTicket(call, sequence, ticket, false, role);
  for (; ticket < params.num_weight_items; ticket = NextTicket(&progress.block_tickets, role)) {
    if (has_workspace && WaitForEntry(call, sequence, role) == Outcome::kArrived) {
      const ProfileSpan span(SpanKind::kSendRoutes);
      SendWeights(tokens, ticket, params.num_weight_items, threads);
    }
    FinishItem(&progress.items_finished, true, role);
  }
  roles.ReleaseSenders();
  for (; ticket < call.num_prologue_items; ticket = NextTicket(&progress.block_tickets, role)) {
    if (has_workspace) {
      InvertRows(call, params.plan, ticket - params.num_weight_items,
                 call.num_prologue_items - params.num_weight_items, threads);
    }
    FinishItem(&progress.items_finished, false, role);
  }
  TokenExpansion expansion(tokens, TokenOrder(call), role);
  const Outcome outcome = WaitForFirstChunks(tokens, role, sequence);
  if (outcome != Outcome::kArrived) return outcome;
  const int32_t end = poisoned ? 0 : EndOfRows(call, params.plan);
  return expansion.Run(sequence, PlannedRows(call, params.plan, end), [&](int max_items) {
    if (poisoned) return;
    const FillItems next_item = {&progress.fill_tickets, max_items};
    FillEmptyRows(tokens, sequence, end, next_item, [&](int row) {
      int assignment;
      return row >= end || !FindAssignment(call, params.plan, row, &assignment);
    });
  });
}

}  // namespace

__global__ void __launch_bounds__(kMaxDispatchThreads, 1)
    RedispatchKernel(const __grid_constant__ RedispatchParams params) {
  const ProfileKernel profile(ProfiledKernel::kRedispatch, 1u | 1u << kDispatchThreads / 32);
  const TokenParams& tokens = params.tokens;
  const CallParams& call = tokens.call;
  __shared__ RoleScratch scratch;
  const DispatchRoles roles =
      SplitBlock(&scratch, kDispatchThreads, tokens.send_pipeline.num_warps);
  const uint64_t sequence = BeginCall(call, roles.all);
  if (sequence == 0) return FillWithNan(tokens, roles.all.GridThreads());
  // Peers that wait for a token must get it, so a rank with a poisoned plan sends all of its
  // tokens.
  const bool poisoned = *params.plan.status != 0;
  auto outcome = Outcome::kArrived;  // this warp's
  if (roles.all.Thread() < kDispatchThreads) {
    outcome = ExpandAndFill(params, roles, sequence, poisoned);
  } else {
    outcome = SendTokens(tokens, TokenOrder(call), roles, sequence, poisoned, [&](int assignment) {
      const int32_t destination = params.plan.destination[assignment];
      return destination < call.num_ranks ? destination : -1;
    });
  }
  if (poisoned) FillWithNan(tokens, roles.all.GridThreads());
  const BlockEnd end = FinishBlock(call, roles.all, outcome);
  if (!end.is_last) return;
  const Outcome failure = KernelOutcome(call, roles.all, end);
  if (failure != Outcome::kArrived) FillWithNan(tokens, roles.all.BlockThreads());
  FinishCall(call, roles.all, sequence);
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

const void* RedispatchKernelAddress() { return reinterpret_cast<const void*>(RedispatchKernel); }

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
