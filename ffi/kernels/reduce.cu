// The second kernel of combine: sums each token's rows here, weighted, and stores the one sum into
// the token's rank, in the slot that is this rank's.
#include "ffi/device/numbers.cuh"
#include "ffi/device/rows.cuh"
#include "ffi/device/signal.cuh"
#include "ffi/kernels/stages.h"

namespace jax_ep {
namespace {

// By one warp.
template <typename Type>
__device__ void ReduceToken(const ReduceStage& stage, int32_t end, int source, int token) {
  constexpr int kLoads = 2;  // chunks at once
  const Call& call = stage.call;
  const TokenRows found = RowsOfToken(call, stage.plan, end, source, token);
  if (found.choices == 0) return;
  const int lane = threadIdx.x % 32;

  float weights[2] = {1, 1};
  for (int half = 0; half < 2; ++half) {
    const int32_t row = found.rows[half];
    if (row < 0) continue;
    if (stage.has_weights) weights[half] = stage.row_weights[row];
    if (stage.has_scalars) {
      float* const scalars = call.Of<float>(source, kChoiceScalars) + token * call.top_k;
      scalars[lane + 32 * half] = stage.row_scalars[row];
    }
  }

  // The plan's word for a place in a peer's memory: checked like every index.
  const int32_t slot = stage.plan.row_slot[found.RowOf(__ffsll(found.choices) - 1)];
  if (slot < 0 || slot >= call.num_slots) return;
  uint4* const to = call.Of<uint4>(source, kPartialRows) +
                    (int64_t{token} * call.num_slots + slot) * call.row_chunks;
  const uint4* const y = static_cast<const uint4*>(stage.y);
  for (int base = lane; base - lane < call.row_chunks; base += 32 * kLoads) {
    float sums[kLoads][kPerChunk<Type>] = {};
    for (uint64_t left = found.choices; left != 0; left &= left - 1) {
      const int k = __ffsll(left) - 1;
      const uint4* const from = y + int64_t{found.RowOf(k)} * call.row_chunks;
      const float weight = __shfl_sync(kWholeWarp, k < 32 ? weights[0] : weights[1], k % 32);
      uint4 chunks[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (base + 32 * i < call.row_chunks) chunks[i] = from[base + 32 * i];
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (base + 32 * i >= call.row_chunks) continue;
        float values[kPerChunk<Type>];
        UnpackChunk<Type>(chunks[i], values);
#pragma unroll
        for (int j = 0; j < kPerChunk<Type>; ++j) {
          sums[i][j] = __fmaf_rn(weight, values[j], sums[i][j]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (base + 32 * i < call.row_chunks) to[base + 32 * i] = PackChunk<Type>(sums[i]);
    }
  }
}

}  // namespace

template <typename Type>
__global__ void __launch_bounds__(kThreads, 2)
    ReduceKernel(const __grid_constant__ ReduceStage stage) {
  const Call& call = stage.call;
  const uint64_t epoch = CurrentEpoch(call);
  // Passed by the index kernel. It holds for the peers' memory that is written here: a peer is done
  // with its partial rows of the previous call when it says that it is done.
  const Outcome outcome = PassGate(call, Gate::kFree, epoch);
  const bool poisoned = *stage.plan.status != 0;
  if (outcome == Outcome::kArrived && !poisoned) {
    const int32_t end = EndOfRows(call, stage.plan);
    const int tokens = call.num_tokens * call.num_ranks;
    const int warps = WarpsOfGrid();
    for (int item = FirstItemOfWarp(); item < tokens; item += warps) {
      // Each rank begins at its own right neighbour, so that all links carry data at once.
      const int source = (item + call.control->rank + 1) % call.num_ranks;
      ReduceToken<Type>(stage, end, source, item / call.num_ranks);
    }
  }
  // A poisoned rank sends no sums, so its peers must not add up what their slots happen to hold.
  if (IsLastBlock(call) && outcome == Outcome::kArrived) SignalReady(call, epoch, poisoned);
}

template __global__ void ReduceKernel<BFloat16>(const __grid_constant__ ReduceStage stage);
template __global__ void ReduceKernel<Float16>(const __grid_constant__ ReduceStage stage);
template __global__ void ReduceKernel<Float32>(const __grid_constant__ ReduceStage stage);

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* ReduceKernelAddress(RowType type) {
  switch (type) {
    case RowType::kBFloat16:
      return reinterpret_cast<const void*>(ReduceKernel<BFloat16>);
    case RowType::kFloat16:
      return reinterpret_cast<const void*>(ReduceKernel<Float16>);
    case RowType::kFloat32:
      return reinterpret_cast<const void*>(ReduceKernel<Float32>);
  }
  return nullptr;
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
