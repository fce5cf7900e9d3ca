// dispatch in one kernel. Its parts are handed out in order:
//
//   tiles of choices   counted and published; the counts go to all ranks
//                      beside them x is copied to where peers can read it, if that is elsewhere
//   tokens             of all ranks, which are given their rows and brought there
//
// In between each block works out of the counts what fits and where the groups begin.
#include "ffi/device/choices.cuh"
#include "ffi/device/incoming_counts.cuh"
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
  __shared__ PeerControls peers;
  const Call& call = stage.pull.call;
  Progress& progress = call.control->progress;
  const uint64_t epoch = CurrentEpoch(call);
  const Halves halves(call, epoch);
  const bool has_workspace = HasWorkspace(call);
  peers.Load(call);

  for (int ticket; (ticket = NextTicket(&progress.tickets)) < call.num_parts;) {
    if (has_workspace) {
      if (ticket == 0) StoreLinesOfTokens(stage.pull, epoch);
      if (ticket < call.num_tiles) {
        ChoiceTile<kDispatchThreads / 32>(call, stage.topk_ids, ticket).Publish(halves, epoch);
      }
      CopyForPeers(stage.pull, ticket, call.num_parts);
    }
    const bool is_sender = ticket == 0 || ticket == call.num_tiles - 1;
    const bool is_last = FinishPart(&progress.finished, call.num_parts, is_sender);
    if (is_last && has_workspace) SignalTokens(call, peers, epoch);
  }
  // In shared memory, where the tiles' counts were: this block has none any more.
  Quotas quotas(call, stage.row_align, halves.rank(),
                reinterpret_cast<int32_t*>(DynamicSharedMemory()));
  TokenPull pull(stage.pull);
  IncomingCounts counts(call, halves);
  if (threadIdx.x == 0) sources.SetMine(stage.pull);
  if (has_workspace) counts.Collect(&quotas);
  AwaitParts(&progress.finished, call.num_parts);
  const Outcome outcome = PassGateWithBlock(
      call, epoch, [&](int peer, const FlagLine& line) { sources.Set(peer, line); });

  if (outcome == Outcome::kArrived) {
    counts.Collect(&quotas);
    __syncthreads();
    quotas.Find([&](int source, int expert) { return counts.Of(source, expert); });
    __syncthreads();
    if (blockIdx.x == 0) quotas.WriteGroups(stage.plan);
    const PlanResults plan = quotas.WithGroups(stage.plan);
    const Placing placing(call, plan, quotas, halves.rank());
    pull.Run(sources, PublishedRoutes(call, placing), [&](int most) {
      const FillTickets tickets = {&progress.warp_tickets[1], most};
      FillEmptyRows(stage.pull, plan.row_offsets[call.num_local], tickets, [&](int row) {
        if (!IsEmptyRow(call, plan, row)) return false;
        SetRow(plan, row, -1, -1, -1, -1);
        return true;
      });
    });
  } else {
    if (blockIdx.x == 0) WriteSafeGroups<kDispatchThreads>(call, stage.plan, outcome);
    WriteSafeResults(stage.pull, stage.plan, Threads::OfGrid());
  }
  const BlockEnd end = CountBlock(call, outcome);
  if (!end.is_last) return;
  const Outcome failure = FinishWithPeers(call, peers, epoch, FailureOf(call, end));
  if (failure == Outcome::kArrived || end.num_failed == gridDim.x) return;
  WriteSafeGroups<kDispatchThreads>(call, stage.plan, failure);
  WriteSafeResults(stage.pull, stage.plan, Threads::OfBlock());
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* DispatchKernelAddress() { return reinterpret_cast<const void*>(DispatchKernel); }

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
