// The last kernel of combine: adds up what the ranks sent for each of this rank's tokens, in rank
// order, and ends the call.
#include "ffi/device/numbers.cuh"
#include "ffi/device/rows.cuh"
#include "ffi/device/signal.cuh"
#include "ffi/kernels/stages.h"

namespace jax_ep {
namespace {

// By one warp.
template <typename Type>
__device__ void SumToken(const SumStage& stage, int token) {
  constexpr int kLoads = 2;  // chunks at once, of each of two slots
  const Call& call = stage.call;
  const int rank = call.control->rank;
  const int lane = threadIdx.x % 32;

  uint32_t low = 0;  // a bit for each rank that the token visits
  uint32_t high = 0;
  for (int half = 0; half < 2; ++half) {
    const int k = lane + 32 * half;
    if (k >= call.top_k) continue;
    const int choice = token * call.top_k + k;
    const int32_t destination = stage.plan.destination[choice];
    const bool kept = 0 <= destination && destination < call.num_ranks;
    if (kept) (destination < 32 ? low : high) |= 1u << destination % 32;
    if (stage.has_scalars) {
      const float* const scalars = call.Of<float>(rank, kChoiceScalars);
      stage.choice_scalars[choice] = kept ? LoadShared4(&scalars[choice]) : 0;
    }
  }
  const int num_sums =
      min(__popc(__reduce_or_sync(kWholeWarp, low)) + __popc(__reduce_or_sync(kWholeWarp, high)),
          call.num_slots);

  const uint4* const from =
      call.Of<uint4>(rank, kPartialRows) + int64_t{token} * call.num_slots * call.row_chunks;
  uint4* const to = static_cast<uint4*>(stage.out) + int64_t{token} * call.row_chunks;
  for (int base = lane; base < call.row_chunks; base += 32 * kLoads) {
    // From +0, like the reference, whose sum goes over all ranks: adding +0 changes nothing.
    float sums[kLoads][kPerChunk<Type>] = {};
#pragma unroll 2
    for (int slot = 0; slot < num_sums; ++slot) {
      uint4 chunks[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (base + 32 * i < call.row_chunks) {
          chunks[i] = LoadShared16(&from[int64_t{slot} * call.row_chunks + base + 32 * i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (base + 32 * i >= call.row_chunks) continue;
        float values[kPerChunk<Type>];
        UnpackChunk<Type>(chunks[i], values);
#pragma unroll
        for (int j = 0; j < kPerChunk<Type>; ++j) {
          sums[i][j] = __fadd_rn(sums[i][j], values[j]);
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
__global__ void __launch_bounds__(kThreads, 2) SumKernel(const __grid_constant__ SumStage stage) {
  const Call& call = stage.call;
  const uint64_t epoch = CurrentEpoch(call);
  const Outcome outcome = PassGate(call, Gate::kReady, epoch);
  if (outcome == Outcome::kArrived && *stage.plan.status == 0) {
    const int warps = WarpsOfGrid();
    for (int token = FirstItemOfWarp(); token < call.num_tokens; token += warps) {
      SumToken<Type>(stage, token);
    }
  } else {
    FillByGrid(static_cast<uint4*>(stage.out), int64_t{call.num_tokens} * call.row_chunks,
               RepeatWord(call.nan_word));
    if (stage.has_scalars) {
      FillByGrid(stage.choice_scalars, call.num_choices(), __int_as_float(0x7fc00000));
    }
  }
  if (IsLastBlock(call)) FinishCall(call, epoch, outcome);
}

template __global__ void SumKernel<BFloat16>(const __grid_constant__ SumStage stage);
template __global__ void SumKernel<Float16>(const __grid_constant__ SumStage stage);
template __global__ void SumKernel<Float32>(const __grid_constant__ SumStage stage);

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* SumKernelAddress(RowType type) {
  switch (type) {
    case RowType::kBFloat16:
      return reinterpret_cast<const void*>(SumKernel<BFloat16>);
    case RowType::kFloat16:
      return reinterpret_cast<const void*>(SumKernel<Float16>);
    case RowType::kFloat32:
      return reinterpret_cast<const void*>(SumKernel<Float32>);
  }
  return nullptr;
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
