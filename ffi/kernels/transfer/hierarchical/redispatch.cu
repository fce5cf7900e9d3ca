// redispatch over several NVLink domains, in one kernel: dispatch with a known plan, without ids
// and counts. A block has kDispatchThreads threads of expand warps, and send warps.
//
//   expand warps   1. take prologue items: ranges of the weights, which they tell this domain, then
//                     ranges of the plan, which they invert, so that each token finds its rows;
//                  2. tell the rail partners the weights, and spread theirs (Metadata);
//                  3. expand the tokens of all ranks into rows as they arrive (ReceiveStreams), and
//                     fill the rows that come from no token.
//   send warps     send this rank's tokens, and forward those of rail partners (SendStreams).
//
// Shared memory: the pipelines of both roles.
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/transfer/dispatch/planned_rows.cuh"
#include "ffi/device/transfer/dispatch/token_expansion.cuh"
#include "ffi/device/transfer/hierarchical/end.cuh"
#include "ffi/device/transfer/hierarchical/forwarding.cuh"
#include "ffi/device/transfer/hierarchical/receive_streams.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

// Where tokens go by the plan. Peers that wait for a token must get it, so a rank with a poisoned
// plan sends and forwards all tokens to all ranks.
struct PlannedRouting {
  const HierarchicalRedispatchParams& params;
  const bool to_all;

  __device__ int Own(int assignment) const {
    const int32_t to = params.redispatch.plan.destination[assignment];
    return to < params.redispatch.tokens.call.num_ranks ? to : -1;
  }

  __device__ int NumBatches() const { return CeilDivide(params.layout.domains.size, 64); }
  __device__ void Forwarded(const Rail& rail, int token, int batch, int32_t (&ranks)[2]) const {
    const CallParams& call = params.redispatch.tokens.call;
    const Domains& domains = params.layout.domains;
    const int first = domains.Rank(domains.Domain(call.control->rank), 0);
    const uint32_t* const token_ranks =
        TokenRanks(call, domains, params.forwarding.token_ranks, rail.domain(), token);
    for (int i = 0; i < 2; ++i) {
      const int word = 2 * batch + i;
      const int index = 32 * word + LaneIndex();
      const bool goes =
          index < domains.size && (to_all || (token_ranks[word] >> LaneIndex() & 1) != 0);
      ranks[i] = goes ? first + index : -1;
    }
  }
};

// Finds a token's rows in one step.
class RowsOfPlan {
 public:
  __device__ RowsOfPlan(const CallParams& call, const PlanOperands& plan, int32_t end)
      : rows_(call, plan, end) {}

  __device__ TokenRows Rows(int source, int token) const {
    return rows_.Rows(source, token, rows_.Load(source, token));
  }

 private:
  const PlannedRows rows_;
};

// Called by the expand warps. In a poisoned plan no token has a row.
__device__ Outcome ExpandAndFill(const HierarchicalRedispatchParams& params,
                                 const DispatchRoles& roles, uint64_t sequence, bool poisoned,
                                 StreamItem* scratch) {
  const RoleContext& role = roles.expand;
  const RedispatchParams& redispatch = params.redispatch;
  const HierarchicalLayout& layout = params.layout;
  const Domains& domains = layout.domains;
  const ThreadGroup threads = role.BlockThreads();
  const TokenParams& tokens = redispatch.tokens;
  const CallParams& call = tokens.call;
  Progress& progress = call.control->progress;
  const bool has_workspace = HasWorkspace(call);
  const int num_weight_items = redispatch.num_weight_items;
  int ticket = NextTicket(&progress.block_tickets, role);
  if (has_workspace) SignalDomainEntry(call, domains, sequence, ticket, false, role);
  for (; ticket < num_weight_items; ticket = NextTicket(&progress.block_tickets, role)) {
    if (has_workspace && WaitForDomainEntry(call, domains, sequence, role) == Outcome::kArrived) {
      SendWeights(tokens, ticket, num_weight_items, threads, DomainRanks{&domains});
    }
    FinishItem(&progress.items_finished, domains.size > 1, role);
  }
  roles.ReleaseSenders();
  for (; ticket < call.num_prologue_items; ticket = NextTicket(&progress.block_tickets, role)) {
    if (has_workspace) {
      InvertRows(call, redispatch.plan, ticket - num_weight_items,
                 call.num_prologue_items - num_weight_items, threads);
    }
    FinishItem(&progress.items_finished, false, role);
  }
  Outcome outcome = WaitForDomainEntry(call, domains, sequence, role);
  if (outcome != Outcome::kArrived) return outcome;
  // The barriers of the next item make the inverted plan visible to all threads.
  if (role.Thread() == 0) WaitForItems(&progress.items_finished, call.num_prologue_items);
  const float* const weights = tokens.has_weights ? tokens.topk_weights : nullptr;
  const Metadata metadata(call, layout, role, nullptr, weights, sequence);
  outcome = metadata.Exchange(metadata.NextItem(), [] {});
  if (outcome != Outcome::kArrived) return outcome;
  const int32_t end = poisoned ? 0 : EndOfRows(call, redispatch.plan);
  const RowsOfPlan rows(call, redispatch.plan, end);
  ReceiveStreams<RowsOfPlan> received(tokens, layout, rows, role, sequence);
  ClaimWords* const claims = &call.control->hierarchical.receive_claims;
  outcome = RunStreams(call, role, received, claims, sequence, scratch);
  received.Finish();
  if (outcome != Outcome::kArrived || poisoned) return outcome;
  const FillItems next_item = {&progress.fill_tickets, kMaxItems};
  FillEmptyRows(tokens, sequence, end, next_item, [&](int row) {
    int assignment;
    return row >= end || !FindAssignment(call, redispatch.plan, row, &assignment);
  });
  return outcome;
}

}  // namespace

__global__ void __launch_bounds__(kMaxDispatchThreads, 1)
    HierarchicalRedispatchKernel(const __grid_constant__ HierarchicalRedispatchParams params) {
  const ProfileKernel profile(ProfiledKernel::kHierarchicalRedispatch,
                              1u | 1u << kDispatchThreads / 32);
  const RedispatchParams& redispatch = params.redispatch;
  const TokenParams& tokens = redispatch.tokens;
  const CallParams& call = tokens.call;
  __shared__ HierarchicalScratch scratch, send_scratch;
  DispatchRoles roles = SplitBlock(&scratch.role, kDispatchThreads, tokens.send_pipeline.num_warps);
  roles.send.scratch = &send_scratch.role;
  const uint64_t sequence = BeginCall(call, roles.all);
  if (sequence == 0) return FillWithNan(tokens, roles.all.GridThreads());
  const bool poisoned = *redispatch.plan.status != 0;
  auto outcome = Outcome::kArrived;  // this warp's
  if (roles.all.Thread() < kDispatchThreads) {
    outcome = ExpandAndFill(params, roles, sequence, poisoned, &scratch.item);
  } else {
    outcome = SendChunks(tokens, params.layout, PlannedRouting{params, poisoned}, roles, sequence,
                         params.num_send_blocks, &send_scratch.item);
  }
  if (poisoned) FillWithNan(tokens, roles.all.GridThreads());
  const BlockEnd end = FinishBlock(call, roles.all, outcome);
  if (!end.is_last) return;
  const Outcome failure = KernelOutcome(call, roles.all, end);
  if (failure != Outcome::kArrived) FillWithNan(tokens, roles.all.BlockThreads());
  FinishHierarchicalCall(call, params.layout, roles.all, sequence, params.layout.num_messages(),
                         failure);
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

const void* HierarchicalRedispatchKernelAddress() {
  return reinterpret_cast<const void*>(HierarchicalRedispatchKernel);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
