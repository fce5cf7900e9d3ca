// dispatch_by_plan in one kernel: the same rows as a dispatch before, without ids and counts. Its
// parts are handed out in order:
//
//   parts of the plan   inverted, so that each token finds its rows; and of the weights, which go
//                       to all ranks when these have entered the call
//
// Then they bring all ranks' tokens to their rows as they come, while the last warps of each block
// send this rank's tokens.
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/transfer/token_expansion.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

// Finds a token's rows in the plan.
class PlannedRows {
 public:
  struct Loaded {
    int32_t guesses[2];  // of choices l and l + 32
  };

  __device__ PlannedRows(const Call& call, const PlanOperands& plan, int32_t end)
      : call_(call), plan_(plan), end_(end) {}

  __device__ Loaded Load(int source, int token) const {
    return {{GuessRow(call_, source, token, 0), GuessRow(call_, source, token, 1)}};
  }

  __device__ TokenRows Rows(int source, int token, const Loaded& loaded) const {
    return CheckRows(call_, plan_, end_, source, token, loaded.guesses);
  }

 private:
  const Call& call_;
  const PlanOperands& plan_;
  const int32_t end_;
};

// What the warps do that do not send. Of a poisoned plan no token has a row.
__device__ Outcome ExpandAndFill(const RedispatchParams& stage, uint64_t sequence, bool poisoned,
                                 const ThreadGroup& threads) {
  const TokenParams& tokens = stage.tokens;
  const Call& call = tokens.call;
  Progress& progress = call.control->progress;
  const bool has_workspace = HasWorkspace(call);
  int ticket = NextTicket(&progress.tickets, threads);
  if (has_workspace) SignalEntryOnFirstTicket(call, sequence, ticket, false, threads);
  for (; ticket < stage.num_weight_parts; ticket = NextTicket(&progress.tickets, threads)) {
    if (has_workspace && WaitForEntry(call, sequence, threads) == Outcome::kArrived) {
      SendWeights(tokens, ticket, stage.num_weight_parts, threads);
    }
    FinishItem(&progress.finished, true, threads);
  }
  ReleaseSenders();
  for (; ticket < call.num_parts; ticket = NextTicket(&progress.tickets, threads)) {
    if (has_workspace) {
      IndexRows(call, stage.plan, ticket - stage.num_weight_parts,
                call.num_parts - stage.num_weight_parts, threads);
    }
    FinishItem(&progress.finished, false, threads);
  }
  TokenExpansion expansion(tokens);
  const Outcome outcome = WaitForFirstChunks(tokens, threads, sequence);
  if (outcome != Outcome::kArrived) return outcome;
  const int32_t end = poisoned ? 0 : EndOfRows(call, stage.plan);
  return expansion.Run(sequence, PlannedRows(call, stage.plan, end), [&](int most) {
    if (poisoned) return;
    const FillTickets tickets = {&progress.fill_tickets, most};
    FillEmptyRows(tokens, end, tickets, [&](int row) {
      int choice;
      return row >= end || !SourceOfRow(call, stage.plan, row, &choice);
    });
  });
}

}  // namespace

__global__ void __launch_bounds__(kMostDispatchThreads, 1)
    RedispatchKernel(const __grid_constant__ RedispatchParams stage) {
  const TokenParams& tokens = stage.tokens;
  const Call& call = tokens.call;
  const uint64_t sequence = CurrentSequence(call);
  // What peers get of this rank does not depend on it: then they get all tokens.
  const bool poisoned = *stage.plan.status != 0;
  auto outcome = Outcome::kArrived;  // of this thread's warp
  if (threadIdx.x < kDispatchThreads) {
    outcome = ExpandAndFill(stage, sequence, poisoned, ThreadGroup::FirstThreads(kDispatchThreads));
  } else {
    outcome = SendTokens(tokens, sequence, poisoned, [&](int choice) {
      const int32_t destination = stage.plan.destination[choice];
      return destination < call.num_ranks ? destination : -1;
    });
  }
  if (poisoned) FillWithNan(tokens, ThreadGroup::Grid());
  const BlockEnd end = CountBlock(call, outcome);
  if (!end.is_last) return;
  const Outcome failure = FailureOutcome(call, end);
  FinishCall(call, sequence);
  if (failure == Outcome::kArrived) return;
  FillWithNan(tokens, ThreadGroup::Block());
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* RedispatchKernelAddress() { return reinterpret_cast<const void*>(RedispatchKernel); }

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
