// dispatch in one kernel. Its parts are handed out in order:
//
//   tiles of choices   counted and published; the counts go to all ranks
//   destinations       what fits, and where the groups begin
//   tokens             of all ranks, which are given their rows and brought there
#include "ffi/device/choices.cuh"
#include "ffi/device/pull.cuh"
#include "ffi/device/quotas.cuh"
#include "ffi/device/signal.cuh"
#include "ffi/kernels/stages.h"

namespace jax_ep {
namespace {

__device__ void SetRow(const PlanResults& plan, int row, int rank, int token, int choice,
                       int slot) {
  int32_t* const source = plan.row_source + int64_t{3} * row;
  source[0] = rank;
  source[1] = token;
  source[2] = choice;
  plan.row_slot[row] = slot;
}

// Gives every kept choice of a token its row, by the routes that its rank published and by the
// quotas and first rows of the destinations.
class Placing {
 public:
  struct Loaded {
    int2 routes[2];  // of choices l and l + 32
  };

  __device__ Placing(const Call& call, const PlanResults& plan)
      : call_(call),
        plan_(plan),
        rank_(call.control->rank),
        quotas_(call.Of<int32_t>(rank_, kQuotas)),
        first_rows_(call.Of<int32_t>(rank_, kFirstRows)) {}

  __device__ Loaded Load(int source, int token) const {
    Loaded loaded;
    for (int half = 0; half < 2; ++half) {
      const int k = threadIdx.x % 32 + 32 * half;
      loaded.routes[half] = make_int2(-1, 0);
      if (k >= call_.top_k) continue;
      const int2* const routes = call_.Of<int2>(source, kRoutes);
      loaded.routes[half] = LoadShared8(&routes[int64_t{token} * call_.top_k + k]);
    }
    return loaded;
  }

  __device__ TokenRows Rows(int source, int token, const Loaded& loaded) const {
    int destinations[2];
    uint32_t low = 0;  // a bit for each rank that the token visits
    uint32_t high = 0;
    for (int half = 0; half < 2; ++half) {
      const int destination = DestinationOf(loaded.routes[half]);
      destinations[half] = destination;
      if (destination >= 0) (destination < 32 ? low : high) |= 1u << destination % 32;
    }
    const uint64_t visited =
        __reduce_or_sync(kWholeWarp, low) | uint64_t{__reduce_or_sync(kWholeWarp, high)} << 32;
    const int slot = __popcll(visited & ((uint64_t{1} << rank_) - 1));
    TokenRows found;
    found.choices = 0;
    for (int half = 0; half < 2; ++half) {
      const int k = threadIdx.x % 32 + 32 * half;
      const int2 route = loaded.routes[half];
      int32_t row = -1;
      if (destinations[half] == rank_) {
        const int local = route.x - rank_ * call_.num_local;
        row = LoadShared4(&first_rows_[source * call_.num_local + local]) + route.y;
        if (row < 0 || row >= call_.num_rows) row = -1;
      }
      if (row >= 0) SetRow(plan_, row, source, token, k, slot);
      if (source == rank_ && k < call_.top_k) {
        const int64_t choice = int64_t{token} * call_.top_k + k;
        plan_.kept[choice] = destinations[half] >= 0;
        plan_.destination[choice] = destinations[half];
      }
      found.rows[half] = row;
      found.choices |= uint64_t{__ballot_sync(kWholeWarp, row >= 0)} << (32 * half);
    }
    return found;
  }

 private:
  // The rank that a choice goes to; -1 if it is unrouted or dropped. Routes are a peer's data.
  __device__ int DestinationOf(int2 route) const {
    const bool is_routed = 0 <= route.x && route.x < call_.num_experts && route.y >= 0;
    return is_routed && route.y < LoadShared4(&quotas_[route.x]) ? route.x / call_.num_local : -1;
  }

  const Call& call_;
  const PlanResults& plan_;
  const int rank_;
  const int32_t* const quotas_;
  const int32_t* const first_rows_;
};

// Whether a row is beyond its group's real rows, or beyond all groups.
__device__ bool IsEmptyRow(const Call& call, const PlanResults& plan, int row) {
  if (row >= plan.row_offsets[call.num_local]) return true;
  int low = 0;  // the last group that begins at or before the row is in [low, high)
  int high = call.num_local;
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (plan.row_offsets[middle] <= row ? low : high) = middle;
  }
  return row - plan.row_offsets[low] >= plan.real_group_sizes[low];
}

__device__ void WriteSafeResults(const DispatchStage& stage, const Threads& threads) {
  const Call& call = stage.pull.call;
  const PlanResults& plan = stage.plan;
  Fill(threads, plan.row_source, 3 * int64_t{call.num_rows}, -1);
  Fill(threads, plan.row_slot, call.num_rows, -1);
  Fill(threads, plan.kept, call.num_choices(), false);
  Fill(threads, plan.destination, call.num_choices(), -1);
  FillWithNan(stage.pull, threads);
}

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
    if (is_last && outcome == Outcome::kArrived) SignalTokens(stage.pull, epoch);
  }
  AwaitParts(&progress.finished[0], call.num_tiles);

  outcome = PassGate(call, Gate::kReady, epoch);  // WAIT_READY
  for (; ticket < call.num_tiles + call.num_ranks; ticket = NextTicket(&progress.tickets)) {
    const int destination = ticket - call.num_tiles;
    const bool is_mine = destination == call.control->rank;
    if (outcome == Outcome::kArrived) {
      Destination<kDispatchThreads> numbers(call, stage.row_align, destination);
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
    sources.Find(stage.pull);
    PullTokens(stage.pull, sources, Placing(call, plan));
    FillEmptyRows(stage.pull, plan.row_offsets[call.num_local], [&](int row) {
      if (!IsEmptyRow(call, plan, row)) return false;
      SetRow(plan, row, -1, -1, -1, -1);
      return true;
    });
  } else {
    WriteSafeResults(stage, Threads::OfGrid());
  }
  if (!IsLastBlock(call)) return;
  const Outcome end = FinishCall(call, epoch, outcome, /*in_place=*/true);
  if (end == outcome) return;
  WriteSafeGroups<kDispatchThreads>(call, plan, end);
  WriteSafeResults(stage, Threads::OfBlock());
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* DispatchKernelAddress() { return reinterpret_cast<const void*>(DispatchKernel); }

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
