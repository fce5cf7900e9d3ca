// The last kernel of dispatch and of dispatch_by_plan: brings each token that has rows here over
// NVLink once, stores it to all of them, and ends the call.
#include "ffi/device/rows.cuh"
#include "ffi/device/signal.cuh"
#include "ffi/kernels/stages.h"

namespace jax_ep {
namespace {

constexpr int kLoads = 8;  // chunks in flight of a lane

// By one warp.
__device__ void PullToken(const PullStage& stage, int32_t end, int source, int token) {
  const Call& call = stage.call;
  const TokenRows found = RowsOfToken(call, stage.plan, end, source, token);
  if (found.choices == 0) return;
  const int lane = threadIdx.x % 32;
  const bool is_mine = source == call.control->rank;

  if (stage.has_weights) {
    const float* const weights =
        (is_mine ? stage.topk_weights : call.Of<float>(source, kPublishedWeights)) +
        int64_t{token} * call.top_k;
    for (int half = 0; half < 2; ++half) {
      const int32_t row = found.rows[half];
      if (row >= 0) stage.row_weights[row] = LoadShared4(&weights[lane + 32 * half]);
    }
  }

  const uint4* const from =
      (is_mine ? static_cast<const uint4*>(stage.x) : call.Of<uint4>(source, kPublishedRows)) +
      int64_t{token} * call.row_chunks;
  uint4* const rows = static_cast<uint4*>(stage.rows);
  for (int base = lane; base - lane < call.row_chunks; base += 32 * kLoads) {
    uint4 chunks[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (base + 32 * i < call.row_chunks) chunks[i] = LoadShared16(&from[base + 32 * i]);
    }
    for (uint64_t left = found.choices; left != 0; left &= left - 1) {
      uint4* const to = rows + int64_t{found.RowOf(__ffsll(left) - 1)} * call.row_chunks;
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (base + 32 * i < call.row_chunks) to[base + 32 * i] = chunks[i];
      }
    }
  }
}

// Zeros in padding: rows of a group that come from no token. By one warp, 32 rows at once.
__device__ void ClearPadding(const PullStage& stage, int32_t end, int first_row) {
  const Call& call = stage.call;
  const int lane = threadIdx.x % 32;
  const int row = first_row + lane;
  int choice;
  const bool is_padding = row < end && !SourceOfRow(call, stage.plan, row, &choice);
  if (is_padding && stage.has_weights) stage.row_weights[row] = 0;
  for (uint32_t left = __ballot_sync(kWholeWarp, is_padding); left != 0; left &= left - 1) {
    uint4* const to =
        static_cast<uint4*>(stage.rows) + int64_t{first_row + __ffs(left) - 1} * call.row_chunks;
    for (int i = lane; i < call.row_chunks; i += 32) to[i] = RepeatWord(0);
  }
}

// Rows from `first_row` on, all the same. By the whole grid.
__device__ void FillRows(const PullStage& stage, int first_row, uint32_t word, float weight) {
  const int64_t chunks = stage.call.row_chunks;
  const int count = stage.call.num_rows - first_row;
  FillByGrid(static_cast<uint4*>(stage.rows) + first_row * chunks, count * chunks,
             RepeatWord(word));
  if (stage.has_weights) FillByGrid(stage.row_weights + first_row, count, weight);
}

__device__ void PullAll(const PullStage& stage) {
  const Call& call = stage.call;
  const int32_t end = EndOfRows(call, stage.plan);
  const int warps = WarpsOfGrid();
  const int tokens = call.num_tokens * call.num_ranks;
  for (int item = FirstItemOfWarp(); item < tokens; item += warps) {
    // Each rank begins at its own right neighbour, so that all links carry data at once.
    const int source = (item + call.control->rank + 1) % call.num_ranks;
    PullToken(stage, end, source, item / call.num_ranks);
  }
  for (int row = 32 * FirstItemOfWarp(); row < end; row += 32 * warps) {
    ClearPadding(stage, end, row);
  }
  if (stage.zero_tail) FillRows(stage, end, 0, 0);
}

}  // namespace

__global__ void __launch_bounds__(kThreads, 2) PullKernel(const __grid_constant__ PullStage stage) {
  const Call& call = stage.call;
  const uint64_t epoch = CurrentEpoch(call);
  const Outcome outcome = PassGate(call, Gate::kReady, epoch);
  if (outcome == Outcome::kArrived && *stage.plan.status == 0) {
    PullAll(stage);
  } else {
    FillRows(stage, 0, call.nan_word, __int_as_float(0x7fc00000));
  }
  if (IsLastBlock(call)) FinishCall(call, epoch, outcome);
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* PullKernelAddress() { return reinterpret_cast<const void*>(PullKernel); }

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
