// The results of dispatch and redispatch besides expanded rows: rows that come from no token, and
// safe values for a call that failed.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_RESULTS_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_RESULTS_CUH_

#include "ffi/device/profile/recorder.cuh"
#include "ffi/device/protocol/peer_stores.cuh"
#include "ffi/device/transfer/dispatch/scale_words.cuh"
#include "ffi/device/transfer/dispatch/token_params.h"
#include "ffi/device/transfer/fill.cuh"
#include "ffi/device/transfer/plan.h"

namespace jax_ep {

__device__ inline void WriteRowSource(const PlanResults& plan, int row, int rank, int token, int k,
                                      int partial_sum_index) {
  int32_t* const source = plan.row_source + int64_t{3} * row;
  source[0] = rank;
  source[1] = token;
  source[2] = k;
  plan.partial_sum_index[row] = partial_sum_index;
}

// Returns whether a row is padding of its group, or in the tail.
__device__ inline bool IsEmptyRow(const CallParams& call, const PlanResults& plan, int row) {
  if (row >= plan.row_offsets[call.num_local_experts]) return true;
  int low = 0;  // the last group that begins at or before the row is in [low, high)
  int high = call.num_local_experts;
#pragma unroll 1
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    (plan.row_offsets[middle] <= row ? low : high) = middle;
  }
  return row - plan.row_offsets[low] >= plan.real_group_sizes[low];
}

// Returns the address of a row of the result, for what copies rows to any rank.
__device__ inline PeerPointer<uint4> RowAddress(const TokenParams& params, int row) {
  return PeerPointer<uint4>(static_cast<uint4*>(params.rows)) +
         int64_t{row} * params.call.result_vectors;
}

// Returns the address of the scales of a row of the result.
__device__ inline ScaleDestination RowScales(const TokenParams& params, int row) {
  const int num_bytes = params.call.scale_bytes;
  return {PeerPointer<uint8_t>(params.row_scales) + int64_t{row} * num_bytes, num_bytes};
}

// Called by any lane of the warp that has stored this row, after a __syncwarp.
__device__ inline void CountArrival(const TokenParams& params, uint64_t sequence, int row) {
  uint64_t* const counter = &params.arrivals[1 + row / kArrivalRows];
  // Begins this call's count, unless it has begun. Operations of one thread on one address are in
  // order.
  MaxRelaxedDevice(counter, ArrivalValue(sequence, 0));
  AddReleaseDevice(counter, 1);
}

// Called by warps. Writes zeros with scales of one to padding, and to the tail if zero_tail.
// is_empty(row) returns whether a row comes from no token, and may write its plan. next() returns
// the warp's next item of 32 rows.
template <typename Next, typename IsEmpty>
__device__ void FillEmptyRows(const TokenParams& params, uint64_t sequence, int32_t end, Next next,
                              IsEmpty is_empty) {
  const ProfileSpan span(SpanKind::kFill);
  const CallParams& call = params.call;
  const int lane = LaneIndex();
  const int num_items = CeilDivide(call.num_rows, 32);
#pragma unroll 1
  for (int item; (item = next()) < num_items;) {
    const int first = 32 * item;
    const int row = first + lane;
    const bool is_zero = row < call.num_rows && is_empty(row) && (row < end || params.zero_tail);
    if (is_zero && params.has_weights) params.row_weights[row] = 0;
#pragma unroll 1
    for (uint32_t left = __ballot_sync(kFullWarp, is_zero); left != 0; left &= left - 1) {
      const int empty = first + __ffs(left) - 1;
      uint4* const to = static_cast<uint4*>(params.rows) + int64_t{empty} * call.result_vectors;
#pragma unroll 1
      for (int i = lane; i < call.result_vectors; i += 32) to[i] = RepeatWord(0);
#pragma unroll 1
      for (int i = lane; i < call.num_scale_words; i += 32) {
        RowScales(params, empty).Store(i, call.scale_one);
      }
    }
    if (params.arrivals != nullptr) {
      __syncwarp();
      if (is_zero && row < end) CountArrival(params, sequence, row);
    }
  }
}

// Fills rows, their scales and row weights with NaN.
__device__ inline void FillWithNan(const TokenParams& params, const ThreadGroup& threads) {
  const CallParams& call = params.call;
  Fill(threads, static_cast<uint4*>(params.rows), int64_t{call.num_rows} * call.result_vectors,
       RepeatWord(call.nan_word));
  const int64_t scale_bytes = int64_t{call.num_rows} * call.scale_bytes;
  Fill(threads, reinterpret_cast<int32_t*>(params.row_scales), scale_bytes / 4, call.scale_nan);
  Fill(threads, params.row_scales + scale_bytes / 4 * 4, scale_bytes % 4,
       static_cast<uint8_t>(call.scale_nan));
  if (params.has_weights) Fill(threads, params.row_weights, call.num_rows, Nan());
}

// Called after a failure. Writes safe values to all results of a dispatch: empty groups, and the
// outcome as status.
__device__ __noinline__ inline void WriteSafeResults(const TokenParams& params,
                                                     const PlanResults& plan, Outcome outcome,
                                                     const ThreadGroup& threads) {
  const CallParams& call = params.call;
  Fill(threads, plan.row_offsets, call.num_local_experts + 1, 0);
  Fill(threads, plan.group_sizes, call.num_local_experts, 0);
  Fill(threads, plan.real_group_sizes, call.num_local_experts, 0);
  Fill(threads, plan.num_received, 1, 0);
  Fill(threads, plan.num_dropped, 1, 0);
  Fill(threads, plan.num_bad_ids, 1, 0);
  Fill(threads, plan.status, 1, static_cast<int32_t>(outcome));
  Fill(threads, plan.row_source, 3 * int64_t{call.num_rows}, -1);
  Fill(threads, plan.partial_sum_index, call.num_rows, -1);
  Fill(threads, plan.kept, call.num_assignments(), false);
  Fill(threads, plan.destination, call.num_assignments(), -1);
  FillWithNan(params, threads);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_RESULTS_CUH_
