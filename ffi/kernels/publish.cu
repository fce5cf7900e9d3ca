// The first kernel of dispatch and of dispatch_by_plan: counts choices, or indexes the rows of the
// plan, copies this rank's tokens to where peers read them, and tells the peers.
#include "ffi/device/block.cuh"
#include "ffi/device/rows.cuh"
#include "ffi/device/signal.cuh"
#include "ffi/kernels/stages.h"

namespace jax_ep {
namespace {

constexpr int kCopies = 4;  // loads in flight of a thread

// dst[i] = src[i], by the whole grid.
template <typename T>
__device__ void CopyByGrid(T* dst, const T* src, int64_t count) {
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += kCopies * stride) {
    T values[kCopies];
#pragma unroll
    for (int j = 0; j < kCopies; ++j) {
      if (i + j * stride < count) values[j] = src[i + j * stride];
    }
#pragma unroll
    for (int j = 0; j < kCopies; ++j) {
      if (i + j * stride < count) dst[i + j * stride] = values[j];
    }
  }
}

// Numbers the choices of one expert in (token, choice) order. By one block: each warp has a stretch
// of consecutive choices, counts its own, and then knows where they begin.
__device__ void CountExpert(const int32_t* topk_ids, int num_choices, int32_t expert, Route* routes,
                            int32_t* count) {
  constexpr int kWarps = kThreads / 32;
  __shared__ int32_t warp_counts[kWarps];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int stretch = (num_choices + kThreads - 1) / kThreads * 32;
  const int begin = min(warp * stretch, num_choices);
  const int end = min(begin + stretch, num_choices);

  int32_t matches = 0;
#pragma unroll 8
  for (int i = begin + lane; i < end; i += 32) matches += topk_ids[i] == expert;
  matches = __reduce_add_sync(kWholeWarp, matches);
  __syncthreads();  // the previous expert's counts have been read
  if (lane == 0) warp_counts[warp] = matches;
  __syncthreads();
  int32_t position = 0;
  int32_t total = 0;
  for (int other = 0; other < kWarps; ++other) {
    if (other < warp) position += warp_counts[other];
    total += warp_counts[other];
  }
  if (threadIdx.x == 0) *count = total;
  if (matches == 0) return;

#pragma unroll 4
  for (int base = begin; base < end; base += 32) {
    const int i = base + lane;
    const bool match = i < end && topk_ids[i] == expert;
    const uint32_t lanes = __ballot_sync(kWholeWarp, match);
    if (match) routes[i] = {expert, position + __popc(lanes & ((1u << lane) - 1))};
    position += __popc(lanes);
  }
}

// Choices without an expert, and how many of them are mistakes. By one block.
__device__ void CountUnrouted(const int32_t* topk_ids, int num_choices, int32_t num_experts,
                              Route* routes, int32_t* num_bad_ids) {
  int32_t bad = 0;
#pragma unroll 8
  for (int i = threadIdx.x; i < num_choices; i += kThreads) {
    const int32_t id = topk_ids[i];
    if (0 <= id && id < num_experts) continue;
    routes[i] = {-1, 0};
    bad += id != -1;
  }
  const int64_t total = PrefixSumOfBlock(bad).total;
  if (threadIdx.x == 0) *num_bad_ids = static_cast<int32_t>(total);
}

}  // namespace

__global__ void __launch_bounds__(kThreads, 2)
    PublishKernel(const __grid_constant__ PublishStage stage) {
  const Call& call = stage.call;
  const uint64_t epoch = CurrentEpoch(call);
  const Outcome outcome = PassGate(call, Gate::kFree, epoch);
  if (outcome == Outcome::kArrived) {
    const int rank = call.control->rank;
    if (call.num_ranks > 1) {  // a rank reads its own tokens where they are
      CopyByGrid(call.Of<uint4>(rank, kPublishedRows), static_cast<const uint4*>(stage.x),
                 int64_t{call.num_tokens} * call.row_chunks);
      if (stage.topk_weights != nullptr) {
        CopyByGrid(call.Of<float>(rank, kPublishedWeights), stage.topk_weights, call.num_choices());
      }
    }
    if (call.operation == Operation::kDispatchByPlan) {
      IndexRows(call, stage.plan);
    } else {
      Route* const routes = call.Of<Route>(rank, kRoutes);
      int32_t* const counts = call.Of<int32_t>(rank, kCounts);
      for (int expert = blockIdx.x; expert < call.num_experts; expert += gridDim.x) {
        CountExpert(stage.topk_ids, call.num_choices(), expert, routes, &counts[expert]);
      }
      if (blockIdx.x == gridDim.x - 1) {
        CountUnrouted(stage.topk_ids, call.num_choices(), call.num_experts, routes,
                      &counts[call.num_experts]);
      }
    }
  }
  if (IsLastBlock(call) && outcome == Outcome::kArrived) SignalReady(call, epoch, false);
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* PublishKernelAddress() { return reinterpret_cast<const void*>(PublishKernel); }

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
