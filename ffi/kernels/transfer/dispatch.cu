// dispatch in one kernel. Its parts are handed out in order:
//
//   tiles of choices   counted; the counts go to all ranks, and when these have entered the call
//                      the routes and weights, too
//
// Then they work out of the counts what fits and where the groups begin, and bring all ranks'
// tokens to their rows as they come, while the last warps of each block send this rank's tokens.
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/transfer/assignment_tile.cuh"
#include "ffi/device/transfer/incoming_counts.cuh"
#include "ffi/device/transfer/quotas.cuh"
#include "ffi/device/transfer/row_placement.cuh"
#include "ffi/device/transfer/token_expansion.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

// Where a token has its rows, by the routes that its rank sent.
class ReceivedRoutes {
 public:
  struct Loaded {
    Route routes[2];  // of choices l and l + 32
  };

  __device__ ReceivedRoutes(const Call& call, const RowPlacement& placing)
      : call_(call),
        placing_(placing),
        routes_(reinterpret_cast<const int2*>(call.Of<Route>(call.control->rank, kRoutes))) {}

  __device__ Loaded Load(int source, int token) const {
    Loaded loaded;
    for (int half = 0; half < 2; ++half) {
      const int k = threadIdx.x % 32 + 32 * half;
      loaded.routes[half] = {-1, 0};
      if (k >= call_.top_k) continue;
      const int2 route =
          LoadGlobalNoAllocate(&routes_[(source * call_.num_tokens + token) * call_.top_k + k]);
      loaded.routes[half] = {route.x, route.y};
    }
    return loaded;
  }

  __device__ TokenRows Rows(int source, int token, const Loaded& loaded) const {
    const RowPlacement::Token<2> placed = placing_.Place(source, loaded.routes);
    placing_.Write(source, token, placed);
    return placed.found;
  }

 private:
  const Call& call_;
  const RowPlacement& placing_;
  const int2* const routes_;  // [R][T * K]
};

// What the warps do that do not send.
__device__ Outcome ExpandAndFill(const DispatchParams& stage, uint64_t sequence,
                                 const ThreadGroup& threads) {
  const TokenParams& tokens = stage.tokens;
  const Call& call = tokens.call;
  Progress& progress = call.control->progress;
  const EagerBuffers halves(call, sequence);
  const bool has_workspace = HasWorkspace(call);
  for (int ticket; (ticket = NextTicket(&progress.tickets, threads)) < call.num_parts;) {
    if (has_workspace) {
      SignalEntryOnFirstTicket(call, sequence, ticket, false, threads);
      AssignmentTile<kDispatchThreads / 32> tile(call, stage.topk_ids, ticket);
      tile.Count(halves, sequence, threads);
      if (WaitForEntry(call, sequence, threads) == Outcome::kArrived) {
        tile.SendRoutes();
        SendWeights(tokens, ticket, call.num_parts, threads);
      }
    }
    FinishItem(&progress.finished, true, threads);
  }
  ReleaseSenders();
  // In shared memory, where the tiles' counts were: this block has none any more.
  Quotas quotas(call, stage.row_align, halves.rank(),
                reinterpret_cast<int32_t*>(DynamicSharedMemory()));
  TokenExpansion expansion(tokens);
  IncomingCounts counts(call, halves, threads);
  if (has_workspace) counts.Collect(&quotas);
  const Outcome outcome = WaitForFirstChunks(tokens, threads, sequence);
  if (outcome != Outcome::kArrived) return outcome;
  counts.Collect(&quotas);
  threads.Sync();
  quotas.Find(threads, [&](int source, int expert) { return counts.Of(source, expert); });
  threads.Sync();
  if (blockIdx.x == 0) {
    quotas.WriteGroups(stage.plan, threads);
    if (tokens.arrivals != nullptr) FinishItem(&tokens.arrivals[0], false, threads);
  }
  const PlanResults plan = quotas.WithGroups(stage.plan);
  const RowPlacement placing(call, plan, quotas, halves.rank());
  return expansion.Run(sequence, ReceivedRoutes(call, placing), [&](int most) {
    const FillTickets tickets = {&progress.fill_tickets, most};
    FillEmptyRows(tokens, plan.row_offsets[call.num_local], tickets, [&](int row) {
      if (!IsEmptyRow(call, plan, row)) return false;
      SetRow(plan, row, -1, -1, -1, -1);
      return true;
    });
  });
}

}  // namespace

__global__ void __launch_bounds__(kMostDispatchThreads, 1)
    DispatchKernel(const __grid_constant__ DispatchParams stage) {
  const TokenParams& tokens = stage.tokens;
  const Call& call = tokens.call;
  const uint64_t sequence = CurrentSequence(call);
  auto outcome = Outcome::kArrived;  // of this thread's warp
  if (threadIdx.x < kDispatchThreads) {
    outcome = ExpandAndFill(stage, sequence, ThreadGroup::FirstThreads(kDispatchThreads));
  } else {
    outcome = SendTokens(tokens, sequence, false, [&](int choice) {
      const int32_t expert = stage.topk_ids[choice];
      const bool is_expert = 0 <= expert && expert < call.num_experts;
      return is_expert ? call.by_num_local.Quotient(expert) : -1;
    });
  }
  const BlockEnd end = CountBlock(call, outcome);
  if (!end.is_last) return;
  const Outcome failure = FailureOutcome(call, end);
  FinishCall(call, sequence);
  if (failure == Outcome::kArrived) return;
  WriteSafeGroups(call, stage.plan, failure);
  WriteSafeResults(tokens, stage.plan, ThreadGroup::Block());
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* DispatchKernelAddress() { return reinterpret_cast<const void*>(DispatchKernel); }

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
