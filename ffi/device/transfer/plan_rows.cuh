// The rows of a plan that redispatch and combine are given. The plan maps rows to assignments
// (row_source). These functions invert it: they find the rows of a token.
#ifndef JAX_EP_DEVICE_TRANSFER_PLAN_ROWS_CUH_
#define JAX_EP_DEVICE_TRANSFER_PLAN_ROWS_CUH_

#include "ffi/device/protocol/role_context.cuh"
#include "ffi/device/transfer/lane_assignments.cuh"
#include "ffi/device/transfer/plan.h"

namespace jax_ep {

// Returns the end of the last group. No row from there on is read.
__device__ inline int32_t EndOfRows(const CallParams& call, const PlanOperands& plan) {
  return max(0, min(plan.row_offsets[call.num_local_experts], call.num_rows));
}

// Returns whether a row of [0, EndOfRows) comes from a token, and its index in [R][T][K].
__device__ inline bool FindAssignment(const CallParams& call, const PlanOperands& plan, int row,
                                      int* assignment) {
  const int32_t* const source = plan.row_source + int64_t{3} * row;
  const int32_t rank = source[0];
  const int32_t token = source[1];
  const int32_t k = source[2];
  if (rank < 0 || rank >= call.num_ranks || token < 0 || token >= call.num_tokens || k < 0 ||
      k >= call.top_k) {
    return false;
  }
  *assignment = (rank * call.num_tokens + token) * call.top_k + k;
  return true;
}

// Called by a thread group. Inverts range `item` of `num_items` of row_source into kAssignmentRows.
// Assignments without a row keep the previous contents; CheckRows detects them.
__device__ inline void InvertRows(const CallParams& call, const PlanOperands& plan, int64_t item,
                                  int64_t num_items, const ThreadGroup& threads) {
  const ProfileSpan span(SpanKind::kInvertPlan);
  int32_t* const assignment_rows = call.LocalBuffer<int32_t>(kAssignmentRows);
  const int64_t end = EndOfRows(call, plan);
  const int last = static_cast<int>(end * (item + 1) / num_items);
  for (int row = static_cast<int>(end * item / num_items + threads.index); row < last;
       row += threads.size) {
    int assignment;
    if (FindAssignment(call, plan, row, &assignment)) assignment_rows[assignment] = row;
  }
}

// Returns the unchecked row of this lane's assignment i of a token.
__device__ inline int32_t LoadUncheckedRow(const CallParams& call, int source, int token, int i) {
  const int k = LaneIndex() + 32 * i;
  if (k >= call.top_k) return -1;
  const int32_t* const assignment_rows = call.LocalBuffer<int32_t>(kAssignmentRows);
  return LoadGlobalNoAllocate(
      &assignment_rows[(source * call.num_tokens + token) * call.top_k + k]);
}

// Called by one warp. Keeps the rows whose row_source confirms them: an unchecked row may be stale.
__device__ inline TokenRows CheckRows(const CallParams& call, const PlanOperands& plan, int32_t end,
                                      int source, int token, const int32_t (&unchecked)[2]) {
  TokenRows found;
  found.assignments = 0;
  for (int i = 0; i < 2; ++i) {
    const int k = LaneIndex() + 32 * i;
    const int32_t row = unchecked[i];
    int assignment;
    const bool is_valid = k < call.top_k && 0 <= row && row < end &&
                          FindAssignment(call, plan, row, &assignment) &&
                          assignment == (source * call.num_tokens + token) * call.top_k + k;
    found.rows[i] = is_valid ? row : -1;
    found.assignments |= uint64_t{__ballot_sync(kFullWarp, is_valid)} << (32 * i);
  }
  return found;
}

// Called by one warp. Returns the rows of a token.
__device__ inline TokenRows FindRows(const CallParams& call, const PlanOperands& plan, int32_t end,
                                     int source, int token) {
  const int32_t unchecked[2] = {LoadUncheckedRow(call, source, token, 0),
                                LoadUncheckedRow(call, source, token, 1)};
  return CheckRows(call, plan, end, source, token, unchecked);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_PLAN_ROWS_CUH_
