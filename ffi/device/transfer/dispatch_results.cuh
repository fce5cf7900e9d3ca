// What dispatch writes besides rows that come from tokens: the plan's rows, and results that are
// safe if the call failed.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_RESULTS_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_RESULTS_CUH_

#include "ffi/device/transfer/plan.h"
#include "ffi/device/transfer/plan_rows.cuh"
#include "ffi/device/transfer/token_params.h"

namespace jax_ep {

__device__ inline void SetRow(const PlanResults& plan, int row, int rank, int token, int choice,
                              int slot) {
  int32_t* const source = plan.row_source + int64_t{3} * row;
  source[0] = rank;
  source[1] = token;
  source[2] = choice;
  plan.partial_sum_index[row] = slot;
}

// Whether a row is beyond its group's real rows, or beyond all groups.
__device__ inline bool IsEmptyRow(const Call& call, const PlanResults& plan, int row) {
  if (row >= plan.row_offsets[call.num_local]) return true;
  int low = 0;  // the last group that begins at or before the row is in [low, high)
  int high = call.num_local;
#pragma unroll 1
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (plan.row_offsets[middle] <= row ? low : high) = middle;
  }
  return row - plan.row_offsets[low] >= plan.real_group_sizes[low];
}

// By any lane of the warp that has stored this row, after a barrier of the warp.
__device__ inline void CountArrival(const TokenParams& stage, int row) {
  AddReleaseDevice(&stage.arrivals[1 + row / kArrivalRows], 1);
}

// Zeros in padding, and in the tail if that is wanted. `is_empty(row)` says which rows come from no
// token, and does what else is to be done with these. By any warps, 32 rows at a time, of which
// `next` gives each to one.
template <typename Next, typename IsEmpty>
__device__ void FillEmptyRows(const TokenParams& stage, int32_t end, Next next, IsEmpty is_empty) {
  const Call& call = stage.call;
  const int lane = threadIdx.x % 32;
  const int num_fills = CeilDivide(call.num_rows, 32);
#pragma unroll 1
  for (int fill; (fill = next()) < num_fills;) {
    const int first = 32 * fill;
    const int row = first + lane;
    const bool is_zero = row < call.num_rows && is_empty(row) && (row < end || stage.zero_tail);
    if (is_zero && stage.has_weights) stage.row_weights[row] = 0;
#pragma unroll 1
    for (uint32_t left = __ballot_sync(kFullWarp, is_zero); left != 0; left &= left - 1) {
      uint4* const to =
          static_cast<uint4*>(stage.rows) + int64_t{first + __ffs(left) - 1} * call.row_vectors;
#pragma unroll 1
      for (int i = lane; i < call.row_vectors; i += 32) to[i] = RepeatWord(0);
    }
    if (stage.arrivals != nullptr) {
      __syncwarp();
      if (is_zero && row < end) CountArrival(stage, row);
    }
  }
}

// NaN everywhere.
__device__ inline void FillWithNan(const TokenParams& stage, const ThreadGroup& threads) {
  const Call& call = stage.call;
  Fill(threads, static_cast<uint4*>(stage.rows), int64_t{call.num_rows} * call.row_vectors,
       RepeatWord(call.nan_word));
  if (stage.has_weights) Fill(threads, stage.row_weights, call.num_rows, Nan());
}

// By all threads of a block.
__device__ __noinline__ inline void WriteSafeGroups(const Call& call, const PlanResults& plan,
                                                    Outcome outcome) {
  for (int local = threadIdx.x; local <= call.num_local; local += blockDim.x) {
    plan.row_offsets[local] = 0;
    if (local == call.num_local) break;
    plan.group_sizes[local] = 0;
    plan.real_group_sizes[local] = 0;
  }
  if (threadIdx.x == 0) {
    *plan.num_received = 0;
    *plan.num_dropped = 0;
    *plan.num_bad_ids = 0;
    *plan.status = static_cast<int32_t>(outcome);
  }
}

// And of the plan what is not of groups.
__device__ __noinline__ inline void WriteSafeResults(const TokenParams& stage,
                                                     const PlanResults& plan,
                                                     const ThreadGroup& threads) {
  const Call& call = stage.call;
  Fill(threads, plan.row_source, 3 * int64_t{call.num_rows}, -1);
  Fill(threads, plan.partial_sum_index, call.num_rows, -1);
  Fill(threads, plan.kept, call.num_assignments(), false);
  Fill(threads, plan.destination, call.num_assignments(), -1);
  FillWithNan(stage, threads);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_RESULTS_CUH_
