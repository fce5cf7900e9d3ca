// Rows: filling them, and finding those of a token by a plan.
#ifndef JAX_EP_DEVICE_ROWS_CUH_
#define JAX_EP_DEVICE_ROWS_CUH_

#include "ffi/device/call.h"
#include "ffi/device/memory.cuh"
#include "ffi/device/plan.h"
#include "ffi/device/wait.cuh"

namespace jax_ep {

// ---- by the whole grid

template <typename T>
__device__ inline void FillByGrid(T* begin, int64_t count, T value) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    begin[i] = value;
  }
}

__device__ inline uint4 RepeatWord(uint32_t word) { return make_uint4(word, word, word, word); }

// The first of this warp's items and the distance to the next: neighbours go to different blocks.
__device__ inline int FirstItemOfWarp() { return threadIdx.x / 32 * gridDim.x + blockIdx.x; }
__device__ inline int WarpsOfGrid() { return blockDim.x / 32 * gridDim.x; }

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

// Inverts row_source. Entries that no row sets keep what memory held; RowsOfToken tells them apart.
__device__ inline void IndexRows(const Call& call, const PlanOperands& plan) {
  int32_t* const row_of_choices = call.Of<int32_t>(call.control->rank, kRowOfChoices);
  const int32_t end = EndOfRows(call, plan);
  const int stride = gridDim.x * blockDim.x;
  for (int row = blockIdx.x * blockDim.x + threadIdx.x; row < end; row += stride) {
    int choice;
    if (SourceOfRow(call, plan, row, &choice)) row_of_choices[choice] = row;
  }
}

// The local rows of one token of one rank, spread over a warp: lane l has those of choices l and
// l + 32, -1 if there is none.
struct TokenRows {
  int32_t rows[2];
  uint64_t choices;  // one bit for each choice that has a row; the same in all lanes

  __device__ int32_t RowOf(int k) const {
    return __shfl_sync(kWholeWarp, k < 32 ? rows[0] : rows[1], k % 32);
  }
};

__device__ inline TokenRows RowsOfToken(const Call& call, const PlanOperands& plan, int32_t end,
                                        int source, int token) {
  const int32_t* const row_of_choices = call.Of<int32_t>(call.control->rank, kRowOfChoices);
  TokenRows found;
  found.choices = 0;
  for (int half = 0; half < 2; ++half) {
    const int k = threadIdx.x % 32 + 32 * half;
    int32_t row = -1;
    if (k < call.top_k) {
      const int choice = (source * call.num_tokens + token) * call.top_k + k;
      const int32_t guess = row_of_choices[choice];
      int origin;
      // The row itself has the last word, whether the entry is of this call or stale.
      if (0 <= guess && guess < end && SourceOfRow(call, plan, guess, &origin) &&
          origin == choice) {
        row = guess;
      }
    }
    found.rows[half] = row;
    found.choices |= uint64_t{__ballot_sync(kWholeWarp, row >= 0)} << (32 * half);
  }
  return found;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_ROWS_CUH_
