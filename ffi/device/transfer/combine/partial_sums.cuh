// The two steps of combine. Each rank sums its rows of a token and sends the partial sum to the
// token's rank, which reduces the partial sums of all ranks.
#ifndef JAX_EP_DEVICE_TRANSFER_COMBINE_PARTIAL_SUMS_CUH_
#define JAX_EP_DEVICE_TRANSFER_COMBINE_PARTIAL_SUMS_CUH_

#include "ffi/device/transfer/combine/params.h"
#include "ffi/device/transfer/combine/row_sums.cuh"
#include "ffi/device/transfer/fill.cuh"
#include "ffi/device/transfer/plan_rows.cuh"

namespace jax_ep {

// Vectors [first, end) of a token's row.
struct TokenSegment {
  int32_t token;
  int32_t first;
  int32_t end;
};

// Both functions call `sum(terms, first, end, to)` for the sum, see SumRows.

// Called by one warp. Sums a token's rows with their weights, and stores the result to this rank's
// entry of `partial_rows` on the token's rank. The first segment stores the rows' scalars, too.
template <int kPerLane, typename Sum>
__device__ void SendPartialSum(const CombineParams& params, const TokenRowsPerLane<kPerLane>& found,
                               const TokenSegment& segment, PeerPointer<uint4> partial_rows,
                               PeerPointer<float> assignment_scalars, Sum sum) {
  if (found.assignments == 0) return;
  const CallParams& call = params.call;
  SumTerms<kPerLane> terms;
  terms.assignments = found.assignments;
  for (int i = 0; i < kPerLane; ++i) {
    const int32_t row = found.rows[i];
    terms.rows[i] = reinterpret_cast<uint64_t>(static_cast<const uint4*>(params.y) +
                                               int64_t{row} * call.operand_vectors);
    terms.weights[i] = 1;
    if (row < 0) continue;
    if (params.has_weights) terms.weights[i] = params.row_weights[row];
    if (params.has_scalars && segment.first == 0) {
      const int k = LaneIndex() + 32 * i;
      StoreToPeer(assignment_scalars + (segment.token * call.top_k + k), params.row_scalars[row]);
    }
  }
  // The plan's index becomes an address in a peer's memory, so it is checked.
  const int32_t index = params.plan.partial_sum_index[found.Row(__ffsll(found.assignments) - 1)];
  const bool is_valid = 0 <= index && index < call.num_partial_sums;
  const PeerPointer<uint4> to =
      partial_rows + (int64_t{segment.token} * call.num_partial_sums + index) * call.wire_vectors;
  sum(terms, segment.first, segment.end, is_valid ? to : PeerPointer<uint4>(nullptr));
}

// The kept assignments of a token of this rank, and how many ranks send partial sums of it. Read it
// before the wait for these: the loads then overlap.
template <int kPerLane>
struct KeptAssignments {
  bool is_kept[kPerLane];
  int32_t num_sums;

  __device__ KeptAssignments(const CombineParams& params, int token) {
    const CallParams& call = params.call;
    int32_t destinations[kPerLane];
    for (int i = 0; i < kPerLane; ++i) {
      const int k = LaneIndex() + 32 * i;
      destinations[i] = k < call.top_k ? params.plan.destination[token * call.top_k + k] : -1;
      is_kept[i] = 0 <= destinations[i] && destinations[i] < call.num_ranks;
      if (!is_kept[i]) destinations[i] = -1;
    }
    num_sums = min(__popcll(FirstAssignments(destinations)), call.num_partial_sums);
  }
};

// Called by one warp. Reduces the partial sums of a token of this rank, in rank order.
template <int kPerLane, typename Sum>
__device__ void ReducePartialSums(const CombineParams& params,
                                  const KeptAssignments<kPerLane>& kept,
                                  const TokenSegment& segment, const uint4* partial_rows,
                                  const float* assignment_scalars, Sum sum) {
  const CallParams& call = params.call;
  for (int i = 0; params.has_scalars && segment.first == 0 && i < kPerLane; ++i) {
    const int k = LaneIndex() + 32 * i;
    if (k >= call.top_k) continue;
    const int assignment = segment.token * call.top_k + k;
    params.assignment_scalars[assignment] =
        kept.is_kept[i] ? LoadGlobalNoAllocate(&assignment_scalars[assignment]) : 0;
  }
  // The sum begins with +0, as the reference's over all ranks does, where the other ranks add +0. A
  // weight of 1 does not change the rounding: 1 * x + sum is rounded as x + sum.
  SumTerms<kPerLane> terms;
  terms.assignments = kept.num_sums == 64 ? ~uint64_t{0} : (uint64_t{1} << kept.num_sums) - 1;
  const uint4* const from =
      partial_rows + int64_t{segment.token} * call.num_partial_sums * call.wire_vectors;
  for (int i = 0; i < kPerLane; ++i) {
    const int index = LaneIndex() + 32 * i;
    terms.rows[i] = reinterpret_cast<uint64_t>(from + int64_t{index} * call.wire_vectors);
    terms.weights[i] = 1;
  }
  uint4* const to = static_cast<uint4*>(params.out) + int64_t{segment.token} * call.result_vectors;
  sum(terms, segment.first, segment.end, PeerPointer<uint4>(to));
}

// Called after a failure.
__device__ __noinline__ inline void FillWithNan(const CombineParams& params,
                                                const ThreadGroup& threads) {
  const CallParams& call = params.call;
  Fill(threads, static_cast<uint4*>(params.out), int64_t{call.num_tokens} * call.result_vectors,
       RepeatWord(call.nan_word));
  if (params.has_scalars) Fill(threads, params.assignment_scalars, call.num_assignments(), Nan());
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_COMBINE_PARTIAL_SUMS_CUH_
