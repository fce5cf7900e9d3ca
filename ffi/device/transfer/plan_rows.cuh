// Rows: filling them, and finding those of a token by a plan.
#ifndef JAX_EP_DEVICE_TRANSFER_PLAN_ROWS_CUH_
#define JAX_EP_DEVICE_TRANSFER_PLAN_ROWS_CUH_

#include "ffi/device/protocol/call.h"
#include "ffi/device/protocol/wait.cuh"
#include "ffi/device/ptx/memory.cuh"
#include "ffi/device/transfer/plan.h"

namespace jax_ep {

template <typename T>
__device__ inline void Fill(const ThreadGroup& threads, T* begin, int64_t count, T value) {
  for (int64_t i = threads.number; i < count; i += threads.count) begin[i] = value;
}

__device__ inline float Nan() { return __int_as_float(0x7fc00000); }

__device__ inline uint4 RepeatWord(uint32_t word) { return make_uint4(word, word, word, word); }

// ---- routes of a plan that this rank was given

// Where the tail begins: no row from here on is read.
__device__ inline int32_t EndOfRows(const Call& call, const PlanOperands& plan) {
  return max(0, min(plan.row_offsets[call.num_local], call.num_rows));
}

// Whether a row of [0, EndOfRows) came from a token. If so, `choice` is its place in [R][T][K].
__device__ inline bool SourceOfRow(const Call& call, const PlanOperands& plan, int row,
                                   int* choice) {
  const int32_t* const source = plan.row_source + int64_t{3} * row;
  const int32_t rank = source[0];
  const int32_t token = source[1];
  const int32_t k = source[2];
  if (rank < 0 || rank >= call.num_ranks || token < 0 || token >= call.num_tokens || k < 0 ||
      k >= call.top_k) {
    return false;
  }
  *choice = (rank * call.num_tokens + token) * call.top_k + k;
  return true;
}

// Inverts the `part`th of `num_parts` of row_source. Entries that no row sets keep what memory
// held; CheckRows tells them apart.
__device__ inline void IndexRows(const Call& call, const PlanOperands& plan, int64_t part,
                                 int64_t num_parts, const ThreadGroup& threads) {
  int32_t* const assignment_rows = call.Of<int32_t>(call.control->rank, kAssignmentRows);
  const int64_t end = EndOfRows(call, plan);
  const int last = static_cast<int>(end * (part + 1) / num_parts);
  for (int row = static_cast<int>(end * part / num_parts + threads.number); row < last;
       row += threads.count) {
    int choice;
    if (SourceOfRow(call, plan, row, &choice)) assignment_rows[choice] = row;
  }
}

// The value that a lane has of choice k, of those that a warp has: lane l those of l and l + 32,
// or, if there are not so many choices, of l alone.
template <int kHalves, typename T>
__device__ T AssignmentValue(const T (&values)[kHalves], int k) {
  if constexpr (kHalves == 1) return __shfl_sync(kFullWarp, values[0], k);
  return __shfl_sync(kFullWarp, k < 32 ? values[0] : values[kHalves - 1], k % 32);
}

// A bit for each rank among the lanes' destinations; below 0 is none.
template <int kHalves>
__device__ inline uint64_t VisitedRanks(const int32_t (&destinations)[kHalves]) {
  uint32_t low = 0;
  uint32_t high = 0;
  for (int half = 0; half < kHalves; ++half) {
    const int32_t destination = destinations[half];
    if (destination >= 0) (destination < 32 ? low : high) |= 1u << destination % 32;
  }
  return __reduce_or_sync(kFullWarp, low) | uint64_t{__reduce_or_sync(kFullWarp, high)} << 32;
}

// The local rows of one token of one rank, spread over a warp like this; -1 if there is none.
template <int kHalves>
struct TokenRowsPerLane {
  int32_t rows[kHalves];
  uint64_t choices;  // one bit for each choice that has a row; the same in all lanes

  __device__ int32_t RowOf(int k) const { return AssignmentValue(rows, k); }
};
using TokenRows = TokenRowsPerLane<2>;

// What IndexRows left for this lane's choice of a token, of the first 32 or the others.
__device__ inline int32_t GuessRow(const Call& call, int source, int token, int half) {
  const int k = threadIdx.x % 32 + 32 * half;
  if (k >= call.top_k) return -1;
  const int32_t* const assignment_rows = call.Of<int32_t>(call.control->rank, kAssignmentRows);
  return LoadGlobalNoAllocate(
      &assignment_rows[(source * call.num_tokens + token) * call.top_k + k]);
}

__device__ inline TokenRows CheckRows(const Call& call, const PlanOperands& plan, int32_t end,
                                      int source, int token, const int32_t (&guesses)[2]) {
  TokenRows found;
  found.choices = 0;
  for (int half = 0; half < 2; ++half) {
    const int k = threadIdx.x % 32 + 32 * half;
    const int32_t guess = guesses[half];
    int origin;
    // The row itself has the last word, whether the guess is of this call or stale.
    const bool holds = k < call.top_k && 0 <= guess && guess < end &&
                       SourceOfRow(call, plan, guess, &origin) &&
                       origin == (source * call.num_tokens + token) * call.top_k + k;
    found.rows[half] = holds ? guess : -1;
    found.choices |= uint64_t{__ballot_sync(kFullWarp, holds)} << (32 * half);
  }
  return found;
}

__device__ inline TokenRows RowsOfToken(const Call& call, const PlanOperands& plan, int32_t end,
                                        int source, int token) {
  const int32_t guesses[2] = {GuessRow(call, source, token, 0), GuessRow(call, source, token, 1)};
  return CheckRows(call, plan, end, source, token, guesses);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_PLAN_ROWS_CUH_
