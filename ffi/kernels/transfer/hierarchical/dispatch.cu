// dispatch over several NVLink domains, in one kernel. A block has kDispatchThreads threads of
// expand warps, and send warps.
//
//   expand warps   1. take prologue items: tiles of assignments. They count a tile, and tell this
//                     domain counts, routes and weights;
//                  2. tell the rail partners, and spread in this domain what these tell
//                     (Metadata);
//                  3. wait for the counts of all ranks, and compute quotas and groups from them,
//                     each block for itself;
//                  4. expand the tokens of all ranks into rows as they arrive (ReceiveStreams), and
//                     fill the rows that come from no token.
//   send warps     send this rank's tokens, and forward those of rail partners (SendStreams).
//
// Shared memory: the tiles' counts, later the quotas in their place; the pipelines of both roles.
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/transfer/dispatch/assignment_tile.cuh"
#include "ffi/device/transfer/dispatch/incoming_counts.cuh"
#include "ffi/device/transfer/dispatch/token_expansion.cuh"
#include "ffi/device/transfer/hierarchical/end.cuh"
#include "ffi/device/transfer/hierarchical/forwarding.cuh"
#include "ffi/device/transfer/hierarchical/receive_streams.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

// Where tokens go by their ids: what a rank sends, and forwards, does not depend on counts.
struct RoutingOfIds {
  const DispatchParams& params;
  static constexpr bool to_all = false;

  __device__ int RankOf(int32_t expert) const {
    const CallParams& call = params.tokens.call;
    return 0 <= expert && expert < call.num_experts ? call.RankOfExpert(expert) : -1;
  }
  __device__ int Own(int assignment) const { return RankOf(params.topk_ids[assignment]); }

  __device__ int NumBatches() const { return 1; }
  __device__ void Forwarded(const Rail& rail, int token, int /*batch*/, int32_t (&ranks)[2]) const {
    const CallParams& call = params.tokens.call;
    const auto* const routes = call.LocalBuffer<const int2>(kRoutes);
    const int64_t first = (int64_t{rail.partner()} * call.num_tokens + token) * call.top_k;
    for (int i = 0; i < 2; ++i) {
      const int k = LaneIndex() + 32 * i;
      ranks[i] = k < call.top_k ? RankOf(LoadGlobalNoAllocate(&routes[first + k]).x) : -1;
    }
  }
};

// Called by the expand warps. Collects the counts of all ranks. NETWORK_WAIT_COUNTS
__device__ Outcome WaitForCounts(const CallParams& call, const RoleContext& role,
                                 IncomingCounts* counts, Quotas* quotas, uint64_t sequence) {
  Deadline deadline(call, WaitPoint::kEntry, sequence);
  auto outcome = Outcome::kArrived;
  while (true) {
    counts->Collect(quotas);
    const bool is_complete = !__any_sync(kFullWarp, !counts->IsComplete());
    outcome = FindAbort(call);
    if (outcome == Outcome::kArrived && !is_complete) {
      outcome = deadline.Check(counts->MissingSource());
    }
    if (is_complete || outcome != Outcome::kArrived) break;
    __nanosleep(40);
  }
  if (outcome != Outcome::kArrived && LaneIndex() == 0) RecordFailure(call, outcome);
  // Another warp's failure is this block's.
  if (role.Thread() == 0) role.scratch->outcome = 0;
  role.Sync();
  if (LaneIndex() == 0 && outcome != Outcome::kArrived) {
    atomicExch(&role.scratch->outcome, static_cast<uint32_t>(outcome));
  }
  role.Sync();
  return static_cast<Outcome>(role.scratch->outcome);
}

// Called by the expand warps.
__device__ Outcome ExpandAndFill(const HierarchicalDispatchParams& params,
                                 const DispatchRoles& roles, uint64_t sequence,
                                 StreamItem* scratch) {
  const RoleContext& role = roles.expand;
  const HierarchicalLayout& layout = params.layout;
  const Domains& domains = layout.domains;
  const DomainRanks receivers = {&domains};
  const ThreadGroup threads = role.BlockThreads();
  const TokenParams& tokens = params.dispatch.tokens;
  const CallParams& call = tokens.call;
  Progress& progress = call.control->progress;
  const EagerBuffers eager(call, sequence);
  const bool has_workspace = HasWorkspace(call);
  for (int ticket;
       (ticket = NextTicket(&progress.block_tickets, role)) < call.num_prologue_items;) {
    if (has_workspace) {
      SignalDomainEntry(call, domains, sequence, ticket, false, role);
      AssignmentTile<kDispatchThreads / 32, DomainRanks> tile(call, role, params.dispatch.topk_ids,
                                                              ticket, receivers);
      tile.Count(eager, sequence);
      if (WaitForDomainEntry(call, domains, sequence, role) == Outcome::kArrived) {
        tile.SendRoutes();
        SendWeights(tokens, ticket, call.num_prologue_items, threads, receivers);
      }
    }
    FinishItem(&progress.items_finished, domains.size > 1, role);
  }
  const float* const weights = tokens.has_weights ? tokens.topk_weights : nullptr;
  const Metadata metadata(call, layout, role, &eager, weights, sequence);
  // A block that sends metadata holds its send warps meanwhile: the release of a message would wait
  // for their stores, too.
  const int first = metadata.NextItem();
  bool are_held = metadata.IsFirstSend(first);
  if (!are_held) roles.ReleaseSenders();
  const auto release = [&] {
    if (are_held) roles.ReleaseSenders();
    are_held = false;
  };
  Outcome outcome = WaitForDomainEntry(call, domains, sequence, role);
  if (outcome == Outcome::kArrived) {
    // A barrier follows before anything reads what the items have stored.
    if (role.Thread() == 0) WaitForItems(&progress.items_finished, call.num_prologue_items);
    role.Sync();
    outcome = metadata.Exchange(first, release);
  }
  release();
  if (outcome != Outcome::kArrived) return outcome;
  // The quotas replace the tiles' counts in shared memory: this block has no more tiles.
  Quotas quotas(call, params.dispatch.row_align, eager.rank(),
                reinterpret_cast<int32_t*>(role.shared));
  IncomingCounts counts(call, eager, threads);
  outcome = WaitForCounts(call, role, &counts, &quotas, sequence);
  if (outcome != Outcome::kArrived) return outcome;
  quotas.Compute(threads, [&](int source, int expert) { return counts.Count(source, expert); });
  role.Sync();
  if (role.block == 0) quotas.WriteGroups(params.dispatch.plan, threads);
  const PlanResults plan = quotas.PlanWithGroups(params.dispatch.plan);
  const RowPlacement placement(call, plan, quotas, eager.rank());
  const ForwardedRoutes routes(call, domains, placement, params.forwarding);
  ReceiveStreams<ForwardedRoutes> received(tokens, layout, routes, role, sequence);
  ClaimWords* const claims = &call.control->hierarchical.receive_claims;
  outcome = RunStreams(call, role, received, claims, sequence, scratch);
  received.Finish();
  if (outcome != Outcome::kArrived) return outcome;
  const FillItems next_item = {&progress.fill_tickets, kMaxItems};
  const int32_t end = plan.row_offsets[call.num_local_experts];
  FillEmptyRows(tokens, sequence, end, next_item, [&](int row) {
    if (!IsEmptyRow(call, plan, row)) return false;
    WriteRowSource(plan, row, -1, -1, -1, -1);
    params.forwarding.partial_sum_index[row] = -1;
    return true;
  });
  return outcome;
}

}  // namespace

__global__ void __launch_bounds__(kMaxDispatchThreads, 1)
    HierarchicalDispatchKernel(const __grid_constant__ HierarchicalDispatchParams params) {
  const ProfileKernel profile(ProfiledKernel::kHierarchicalDispatch,
                              1u | 1u << kDispatchThreads / 32);
  const DispatchParams& dispatch = params.dispatch;
  const TokenParams& tokens = dispatch.tokens;
  const CallParams& call = tokens.call;
  const Domains& domains = params.layout.domains;
  __shared__ HierarchicalScratch scratch, send_scratch;
  DispatchRoles roles = SplitBlock(&scratch.role, kDispatchThreads, tokens.send_pipeline.num_warps);
  roles.send.scratch = &send_scratch.role;
  const uint64_t sequence = BeginCall(call, roles.all);
  if (sequence == 0) {
    WriteSafeForwarding(call, domains, params.forwarding, roles.all.GridThreads());
    return WriteSafeResults(tokens, dispatch.plan, Outcome::kConcurrent, roles.all.GridThreads());
  }
  auto outcome = Outcome::kArrived;  // this warp's
  if (roles.all.Thread() < kDispatchThreads) {
    outcome = ExpandAndFill(params, roles, sequence, &scratch.item);
  } else {
    outcome = SendChunks(tokens, params.layout, RoutingOfIds{dispatch}, roles, sequence,
                         params.num_send_blocks, &send_scratch.item);
  }
  const BlockEnd end = FinishBlock(call, roles.all, outcome);
  if (!end.is_last) return;
  const Outcome failure = KernelOutcome(call, roles.all, end);
  if (failure != Outcome::kArrived) {
    WriteSafeForwarding(call, domains, params.forwarding, roles.all.BlockThreads());
    WriteSafeResults(tokens, dispatch.plan, failure, roles.all.BlockThreads());
  }
  FinishHierarchicalCall(call, params.layout, roles.all, sequence, params.layout.num_messages(),
                         failure);
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

const void* HierarchicalDispatchKernelAddress() {
  return reinterpret_cast<const void*>(HierarchicalDispatchKernel);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
