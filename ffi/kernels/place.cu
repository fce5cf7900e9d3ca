// Gives every kept choice its row: reads the routes that the peers published, by the quotas and
// first rows that the plan kernel left. Choices and rows without each other are written here, too.
#include "ffi/device/rows.cuh"
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

// The rank that a choice goes to; -1 if it is unrouted or dropped. Routes are a peer's data.
__device__ int DestinationOf(const Call& call, const int32_t* quotas, Route route) {
  const bool routed = 0 <= route.expert && route.expert < call.num_experts;
  return routed && route.position >= 0 && route.position < quotas[route.expert]
             ? route.expert / call.num_local
             : -1;
}

// The choices of some tokens of one rank, one a thread.
__device__ void PlaceTokens(const PlanStage& stage, int source, int first_token, int num_tokens) {
  __shared__ signed char destinations[kPlaceThreads];
  const Call& call = stage.call;
  const int rank = call.control->rank;
  const bool valid = threadIdx.x < num_tokens * call.top_k;
  const int choice = first_token * call.top_k + threadIdx.x;
  Route route{-1, 0};
  if (valid) {
    const int2 loaded = LoadShared8(call.Of<int2>(source, kRoutes) + choice);
    route = {loaded.x, loaded.y};
  }
  const int destination = DestinationOf(call, call.Of<int32_t>(rank, kQuotas), route);
  __syncthreads();  // the previous tokens' destinations have been read
  destinations[threadIdx.x] = static_cast<signed char>(destination);
  __syncthreads();
  if (!valid) return;

  const int token = first_token + threadIdx.x / call.top_k;
  const int k = threadIdx.x % call.top_k;
  int32_t row = -1;
  if (destination == rank) {
    const int local = route.expert - rank * call.num_local;
    row = call.Of<int32_t>(rank, kFirstRows)[source * call.num_local + local] + route.position;
    if (row >= call.num_rows) row = -1;
  }
  if (row >= 0) {
    uint64_t visited = 0;
    for (int other = 0; other < call.top_k; ++other) {
      const int visit = destinations[threadIdx.x - k + other];
      if (visit >= 0) visited |= uint64_t{1} << visit;
    }
    SetRow(stage.plan, row, source, token, k, __popcll(visited & ((uint64_t{1} << rank) - 1)));
  }
  call.Of<int32_t>(rank, kRowOfChoices)[source * call.num_choices() + choice] = row;
  if (source == rank) {
    stage.plan.kept[choice] = destination >= 0;
    stage.plan.destination[choice] = destination;
  }
}

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

}  // namespace

__global__ void __launch_bounds__(kPlaceThreads)
    PlaceKernel(const __grid_constant__ PlanStage stage) {
  const Call& call = stage.call;
  const PlanResults& plan = stage.plan;
  const Outcome outcome = PassGate(call, Gate::kReady, CurrentEpoch(call));
  if (outcome != Outcome::kArrived) {
    FillByGrid(plan.row_source, 3 * int64_t{call.num_rows}, -1);
    FillByGrid(plan.row_slot, call.num_rows, -1);
    FillByGrid(plan.kept, call.num_choices(), false);
    FillByGrid(plan.destination, call.num_choices(), -1);
    return;
  }
  const int tokens_of_tile = kPlaceThreads / call.top_k;
  const int tiles = (call.num_tokens + tokens_of_tile - 1) / tokens_of_tile;
  for (int tile = blockIdx.x; tile < tiles * call.num_ranks; tile += gridDim.x) {
    const int first_token = tile / call.num_ranks * tokens_of_tile;
    // Each rank begins at its own right neighbour, so that all links carry data at once.
    const int source = (tile + call.control->rank + 1) % call.num_ranks;
    PlaceTokens(stage, source, first_token, min(tokens_of_tile, call.num_tokens - first_token));
  }
  const int stride = gridDim.x * kPlaceThreads;
  for (int row = blockIdx.x * kPlaceThreads + threadIdx.x; row < call.num_rows; row += stride) {
    if (IsEmptyRow(call, plan, row)) SetRow(plan, row, -1, -1, -1, -1);
  }
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* PlaceKernelAddress() { return reinterpret_cast<const void*>(PlaceKernel); }

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
