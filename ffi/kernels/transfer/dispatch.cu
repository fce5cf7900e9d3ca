// dispatch in one kernel. A block has kDispatchThreads threads of expand warps, and send warps.
//
//   expand warps   1. take prologue items: tiles of assignments. They count a tile, send the counts
//                     to all ranks without a wait, and after WaitForEntry send the tile's routes
//                     and weights;
//                  2. wait for the counts and the first chunk of all ranks, and compute quotas and
//                     groups from the counts, each block for itself;
//                  3. expand tokens of all ranks into rows as chunks arrive (TokenExpansion), and
//                     fill the rows that come from no token.
//   send warps     after WaitForEntry, send this rank's tokens chunk by chunk (TokenSender).
//
// Shared memory: the tiles' counts, later the quotas in their place; the pipelines of both roles.
#include "ffi/device/protocol/kernel_end.cuh"
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/transfer/dispatch/assignment_tile.cuh"
#include "ffi/device/transfer/dispatch/incoming_counts.cuh"
#include "ffi/device/transfer/dispatch/quotas.cuh"
#include "ffi/device/transfer/dispatch/received_routes.cuh"
#include "ffi/device/transfer/dispatch/token_expansion.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

// Called by the expand warps.
__device__ Outcome ExpandAndFill(const DispatchParams& params, const DispatchRoles& roles,
                                 uint64_t sequence) {
  const RoleContext& role = roles.expand;
  const ThreadGroup threads = role.BlockThreads();
  const TokenParams& tokens = params.tokens;
  const CallParams& call = tokens.call;
  Progress& progress = call.control->progress;
  const EagerBuffers eager(call, sequence);
  const bool has_workspace = HasWorkspace(call);
  for (int ticket;
       (ticket = NextTicket(&progress.block_tickets, role)) < call.num_prologue_items;) {
    if (has_workspace) {
      SignalEntryOnFirstTicket(call, sequence, ticket, false, role);
      AssignmentTile<kDispatchThreads / 32> tile(call, role, params.topk_ids, ticket);
      tile.Count(eager, sequence);
      if (WaitForEntry(call, sequence, role) == Outcome::kArrived) {
        const ProfileSpan span(SpanKind::kSendRoutes);
        tile.SendRoutes();
        SendWeights(tokens, ticket, call.num_prologue_items, threads);
      }
    }
    FinishItem(&progress.items_finished, true, role);
  }
  roles.ReleaseSenders();
  // The quotas replace the tiles' counts in shared memory: this block has no more tiles.
  Quotas quotas(call, params.row_align, eager.rank(), reinterpret_cast<int32_t*>(role.shared));
  TokenExpansion expansion(tokens, TokenOrder(call), role);
  IncomingCounts counts(call, eager, threads);
  if (has_workspace) counts.Collect(&quotas);
  const Outcome outcome = WaitForFirstChunks(tokens, role, sequence);
  if (outcome != Outcome::kArrived) return outcome;
  {
    const ProfileSpan span(SpanKind::kPlan);
    counts.Collect(&quotas);
    role.Sync();
    quotas.Compute(threads, [&](int source, int expert) { return counts.Count(source, expert); });
    role.Sync();
  }
  if (role.block == 0) {
    quotas.WriteGroups(params.plan, threads);
    if (tokens.arrivals != nullptr) {
      role.Sync();  // all of its threads have written groups
      if (role.Thread() == 0) StoreReleaseDevice(&tokens.arrivals[0], ArrivalValue(sequence, 1));
    }
  }
  const PlanResults plan = quotas.PlanWithGroups(params.plan);
  const RowPlacement placement(call, plan, quotas, eager.rank());
  return expansion.Run(sequence, ReceivedRoutes(call, placement), [&](int max_items) {
    const FillItems next_item = {&progress.fill_tickets, max_items};
    const int32_t end = plan.row_offsets[call.num_local_experts];
    FillEmptyRows(tokens, sequence, end, next_item, [&](int row) {
      if (!IsEmptyRow(call, plan, row)) return false;
      WriteRowSource(plan, row, -1, -1, -1, -1);
      return true;
    });
  });
}

}  // namespace

__global__ void __launch_bounds__(kMaxDispatchThreads, 1)
    DispatchKernel(const __grid_constant__ DispatchParams params) {
  const ProfileKernel profile(ProfiledKernel::kDispatch, 1u | 1u << kDispatchThreads / 32);
  const TokenParams& tokens = params.tokens;
  const CallParams& call = tokens.call;
  __shared__ RoleScratch scratch;
  const DispatchRoles roles =
      SplitBlock(&scratch, kDispatchThreads, tokens.send_pipeline.num_warps);
  const uint64_t sequence = BeginCall(call, roles.all);
  if (sequence == 0) {
    return WriteSafeResults(tokens, params.plan, Outcome::kConcurrent, roles.all.GridThreads());
  }
  auto outcome = Outcome::kArrived;  // this warp's
  if (roles.all.Thread() < kDispatchThreads) {
    outcome = ExpandAndFill(params, roles, sequence);
  } else {
    outcome = SendTokens(tokens, TokenOrder(call), roles, sequence, false, [&](int assignment) {
      const int32_t expert = params.topk_ids[assignment];
      const bool is_expert = 0 <= expert && expert < call.num_experts;
      return is_expert ? call.RankOfExpert(expert) : -1;
    });
  }
  const BlockEnd end = FinishBlock(call, roles.all, outcome);
  if (!end.is_last) return;
  const Outcome failure = KernelOutcome(call, roles.all, end);
  if (failure != Outcome::kArrived) {
    WriteSafeResults(tokens, params.plan, failure, roles.all.BlockThreads());
  }
  FinishCall(call, roles.all, sequence);
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

const void* DispatchKernelAddress() { return reinterpret_cast<const void*>(DispatchKernel); }

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
