// dispatch_by_plan in one kernel: the same rows as a dispatch before, without ids and counts. Its
// parts are handed out in order:
//
//   parts of the plan   inverted, so that each token finds its rows
//   tokens              of all ranks, which are brought there
#include "ffi/device/pull.cuh"
#include "ffi/device/signal.cuh"
#include "ffi/kernels/stages.h"

namespace jax_ep {
namespace {

// Finds a token's rows in the plan.
class ByPlan {
 public:
  struct Loaded {
    int32_t guesses[2];  // of choices l and l + 32
  };

  __device__ ByPlan(const Call& call, const PlanOperands& plan, int32_t end)
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

}  // namespace

__global__ void __launch_bounds__(kDispatchThreads, 1)
    DispatchByPlanKernel(const __grid_constant__ DispatchByPlanStage stage) {
  __shared__ Sources sources;
  __shared__ PeerControls peers;
  const Call& call = stage.pull.call;
  const PlanOperands& plan = stage.plan;
  Progress& progress = call.control->progress;
  const uint64_t epoch = CurrentEpoch(call);

  const bool has_workspace = HasWorkspace(call);
  const bool is_copied = !stage.pull.is_in_place;
  peers.Load(call);

  for (int ticket; (ticket = NextTicket(&progress.tickets)) < call.num_parts;) {
    if (has_workspace) {
      if (ticket == 0) StoreLinesOfTokens(stage.pull, epoch);
      // What peers read in place is there already.
      if (ticket == 0 && !is_copied) SignalTokens(call, peers, epoch);
      CopyForPeers(stage.pull, ticket, call.num_parts);
      IndexRows(call, plan, ticket, call.num_parts);
    }
    const bool is_last = FinishPart(&progress.finished, call.num_parts, ticket == 0);
    if (is_last && is_copied && has_workspace) SignalTokens(call, peers, epoch);
  }
  TokenPull pull(stage.pull);
  if (threadIdx.x == 0) sources.SetMine(stage.pull);
  AwaitParts(&progress.finished, call.num_parts);
  const Outcome outcome = PassGateWithBlock(
      call, epoch, [&](int peer, const FlagLine& line) { sources.Set(peer, line); });

  if (outcome == Outcome::kArrived && *plan.status == 0) {
    const int32_t end = EndOfRows(call, plan);
    pull.Run(sources, ByPlan(call, plan, end), [&](int most) {
      const FillTickets tickets = {&progress.warp_tickets[1], most};
      FillEmptyRows(stage.pull, end, tickets, [&](int row) {
        int choice;
        return row >= end || !SourceOfRow(call, plan, row, &choice);
      });
    });
  } else {
    FillWithNan(stage.pull, Threads::OfGrid());
  }
  const BlockEnd end = CountBlock(call, outcome);
  if (!end.is_last) return;
  const Outcome failure = FinishWithPeers(call, peers, epoch, FailureOf(call, end));
  if (failure == Outcome::kArrived || end.num_failed == gridDim.x) return;
  FillWithNan(stage.pull, Threads::OfBlock());
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* DispatchByPlanKernelAddress() {
  return reinterpret_cast<const void*>(DispatchByPlanKernel);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
