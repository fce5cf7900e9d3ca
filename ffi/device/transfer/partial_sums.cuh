// The two sums of combine: over a rank's experts, sent to the token's rank; and over ranks, there.
#ifndef JAX_EP_DEVICE_TRANSFER_PARTIAL_SUMS_CUH_
#define JAX_EP_DEVICE_TRANSFER_PARTIAL_SUMS_CUH_

#include "ffi/device/transfer/combine_params.h"
#include "ffi/device/transfer/plan_rows.cuh"
#include "ffi/device/transfer/row_sums.cuh"

namespace jax_ep {

// Chunks [first, end) of a token's row.
struct RowSegment {
  int32_t token;
  int32_t first;
  int32_t end;
};

// Both give what is to be summed to `sum(terms, first, end, to)`, see SumRows.

// The rows that were found of a token, weighted and summed, to `partial_rows` of its rank: to the
// slot there that is this rank's. And their scalars, with the first piece. By one warp.
template <int kHalves, typename Sum>
__device__ void SendPartialSum(const CombineParams& stage, const TokenRowsPerLane<kHalves>& found,
                               const RowSegment& piece, uint4* partial_rows,
                               float* assignment_scalars, Sum sum) {
  if (found.choices == 0) return;
  const Call& call = stage.call;
  SumTerms<kHalves> terms;
  terms.which = found.choices;
  for (int half = 0; half < kHalves; ++half) {
    const int32_t row = found.rows[half];
    terms.rows[half] = reinterpret_cast<uint64_t>(static_cast<const uint4*>(stage.y) +
                                                  int64_t{row} * call.row_vectors);
    terms.weights[half] = 1;
    if (row < 0) continue;
    if (stage.has_weights) terms.weights[half] = stage.row_weights[row];
    if (stage.has_scalars && piece.first == 0) {
      const int k = threadIdx.x % 32 + 32 * half;
      assignment_scalars[piece.token * call.top_k + k] = stage.row_scalars[row];
    }
  }
  // The plan's word for a place in a peer's memory: checked like every index.
  const int32_t slot = stage.plan.partial_sum_index[found.RowOf(__ffsll(found.choices) - 1)];
  const bool has_slot = 0 <= slot && slot < call.num_partial_sums;
  uint4* const to =
      partial_rows + (int64_t{piece.token} * call.num_partial_sums + slot) * call.row_vectors;
  sum(terms, piece.first, piece.end, has_slot ? to : nullptr);
}

// Which choices of a token of this rank were kept, and how many ranks have sums of them. To be read
// before what they sent is waited for.
template <int kHalves>
struct KeptAssignments {
  bool is_kept[kHalves];
  int32_t num_sums;

  __device__ KeptAssignments(const CombineParams& stage, int token) {
    const Call& call = stage.call;
    int32_t destinations[kHalves];
    for (int half = 0; half < kHalves; ++half) {
      const int k = threadIdx.x % 32 + 32 * half;
      destinations[half] = k < call.top_k ? stage.plan.destination[token * call.top_k + k] : -1;
      is_kept[half] = 0 <= destinations[half] && destinations[half] < call.num_ranks;
      if (!is_kept[half]) destinations[half] = -1;
    }
    num_sums = min(__popcll(VisitedRanks(destinations)), call.num_partial_sums);
  }
};

// What the ranks sent for a token of this rank, added up in rank order. By one warp.
template <int kHalves, typename Sum>
__device__ void ReducePartialSums(const CombineParams& stage,
                                  const KeptAssignments<kHalves>& choices, const RowSegment& piece,
                                  const uint4* partial_rows, const float* assignment_scalars,
                                  Sum sum) {
  const Call& call = stage.call;
  for (int half = 0; stage.has_scalars && piece.first == 0 && half < kHalves; ++half) {
    const int k = threadIdx.x % 32 + 32 * half;
    if (k >= call.top_k) continue;
    const int choice = piece.token * call.top_k + k;
    stage.assignment_scalars[choice] =
        choices.is_kept[half] ? LoadGlobalNoAllocate(&assignment_scalars[choice]) : 0;
  }
  // From +0, like the reference, whose sum goes over all ranks: adding +0 changes nothing. And
  // one times a number plus a sum is rounded as their sum is.
  SumTerms<kHalves> terms;
  terms.which = choices.num_sums == 64 ? ~uint64_t{0} : (uint64_t{1} << choices.num_sums) - 1;
  const uint4* const from =
      partial_rows + int64_t{piece.token} * call.num_partial_sums * call.row_vectors;
  for (int half = 0; half < kHalves; ++half) {
    const int slot = threadIdx.x % 32 + 32 * half;
    terms.rows[half] = reinterpret_cast<uint64_t>(from + int64_t{slot} * call.row_vectors);
    terms.weights[half] = 1;
  }
  sum(terms, piece.first, piece.end,
      static_cast<uint4*>(stage.out) + int64_t{piece.token} * call.row_vectors);
}

// If the call failed.
__device__ __noinline__ inline void FillWithNan(const CombineParams& stage,
                                                const ThreadGroup& threads) {
  const Call& call = stage.call;
  Fill(threads, static_cast<uint4*>(stage.out), int64_t{call.num_tokens} * call.row_vectors,
       RepeatWord(call.nan_word));
  if (stage.has_scalars) Fill(threads, stage.assignment_scalars, call.num_assignments(), Nan());
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_PARTIAL_SUMS_CUH_
