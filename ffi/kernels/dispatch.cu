// dispatch in one kernel. Its parts are handed out in order:
//
//   tiles of choices   counted and published; the counts go to all ranks
//   destinations       what fits, and where the groups begin
//   tokens             of all ranks, which are given their rows and brought there
#include "ffi/device/choices.cuh"
#include "ffi/device/placing.cuh"
#include "ffi/device/pull.cuh"
#include "ffi/device/quotas.cuh"
#include "ffi/device/signal.cuh"
#include "ffi/kernels/stages.h"

namespace jax_ep {
namespace {

// Where a token has its rows, by the routes that its rank published.
class PublishedRoutes {
 public:
  struct Loaded {
    Route routes[2];  // of choices l and l + 32
  };

  __device__ PublishedRoutes(const Call& call, const Placing& placing)
      : call_(call), placing_(placing) {}

  __device__ Loaded Load(int source, int token) const {
    Loaded loaded;
    for (int half = 0; half < 2; ++half) {
      const int k = threadIdx.x % 32 + 32 * half;
      loaded.routes[half] = {-1, 0};
      if (k >= call_.top_k) continue;
      const int2* const routes = call_.Of<int2>(source, kRoutes);
      const int2 route = LoadShared8(&routes[int64_t{token} * call_.top_k + k]);
      loaded.routes[half] = {route.x, route.y};
    }
    return loaded;
  }

  __device__ TokenRows Rows(int source, int token, const Loaded& loaded) const {
    const Placing::Token<2> placed = placing_.Place(source, loaded.routes);
    placing_.Write(source, token, placed);
    return placed.found;
  }

 private:
  const Call& call_;
  const Placing& placing_;
};

}  // namespace

__global__ void __launch_bounds__(kDispatchThreads, 1)
    DispatchKernel(const __grid_constant__ DispatchStage stage) {
  __shared__ Sources sources;
  const Call& call = stage.pull.call;
  const PlanResults& plan = stage.plan;
  Progress& progress = call.control->progress;
  const uint64_t epoch = CurrentEpoch(call);

  Outcome outcome = PassGate(call, Gate::kFree, epoch);  // WAIT_FREE
  int ticket = NextTicket(&progress.tickets);
  for (; ticket < call.num_tiles; ticket = NextTicket(&progress.tickets)) {
    if (outcome == Outcome::kArrived) {
      CopyForPeers(stage.pull, ticket, call.num_tiles);
      ChoiceTile<kDispatchThreads / 32>(call, stage.topk_ids, ticket).Publish(epoch);
    }
    const bool is_last = FinishPart(&progress.finished[0], call.num_tiles, true);
    if (is_last && outcome == Outcome::kArrived && threadIdx.x < 32)
      SignalTokens(stage.pull, epoch);
  }
  AwaitParts(&progress.finished[0], call.num_tiles);

  outcome = PassGate(call, Gate::kReady, epoch);  // WAIT_READY
  const CountTables tables = CountTables::OfWorkspace(call);
  for (; ticket < call.num_tiles + call.num_ranks; ticket = NextTicket(&progress.tickets)) {
    const int destination = ticket - call.num_tiles;
    const bool is_mine = destination == call.control->rank;
    if (outcome == Outcome::kArrived) {
      Destination<kDispatchThreads> numbers(call, tables, stage.row_align, destination);
      numbers.AddRanks();
      numbers.FindQuotas();
      if (is_mine) numbers.WriteGroups(plan);
    } else if (is_mine) {
      WriteSafeGroups<kDispatchThreads>(call, plan, outcome);
    }
    FinishPart(&progress.finished[1], call.num_ranks, false);
  }
  AwaitParts(&progress.finished[1], call.num_ranks);

  if (outcome == Outcome::kArrived) {
    sources.Find(stage.pull, epoch);
    const Placing placing(call, plan, tables, call.control->rank);
    PullTokens(stage.pull, sources, PublishedRoutes(call, placing));
    const auto next_fill = [&] { return NextTicketOfWarp(&progress.warp_tickets[1]); };
    FillEmptyRows(stage.pull, plan.row_offsets[call.num_local], next_fill, [&](int row) {
      if (!IsEmptyRow(call, plan, row)) return false;
      SetRow(plan, row, -1, -1, -1, -1);
      return true;
    });
  } else {
    WriteSafeResults(stage.pull, plan, Threads::OfGrid());
  }
  if (!IsLastBlock(call)) return;
  const Outcome end = FinishCall(call, epoch, outcome, /*in_place=*/true);
  if (end == outcome) return;
  WriteSafeGroups<kDispatchThreads>(call, plan, end);
  WriteSafeResults(stage.pull, plan, Threads::OfBlock());
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* DispatchKernelAddress() { return reinterpret_cast<const void*>(DispatchKernel); }

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
