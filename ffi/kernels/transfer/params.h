// The kernels of the transfers: what each is given, and its address for the launch.
#ifndef JAX_EP_KERNELS_TRANSFER_PARAMS_H_
#define JAX_EP_KERNELS_TRANSFER_PARAMS_H_

#include "ffi/device/transfer/combine_params.h"
#include "ffi/device/transfer/low_latency/layout.h"
#include "ffi/device/transfer/plan.h"
#include "ffi/device/transfer/token_params.h"

namespace jax_ep {

// ThreadGroup of a block. Two of combine fit on a multiprocessor, one of dispatch.
inline constexpr int kCombineThreads = 384;
inline constexpr int kDispatchThreads = 256;  // besides those that send
inline constexpr int kMostDispatchThreads = kDispatchThreads + 128;

// Of the kernels for small calls.
inline constexpr int kLowLatencyThreads = 512;

// Of shared memory, for each warp of combine (row_sums.cuh), and of a small one.
inline constexpr int kSumPipelineBytes = 8 * 1024;
inline constexpr int kLowLatencySumPipelineBytes = 4 * 1024;

// Choices of a tile: as many for each warp, some for each lane.
inline constexpr int kTileAssignments = 1024;
static_assert(kTileAssignments % kDispatchThreads == 0);

struct DispatchParams {
  TokenParams tokens;
  FastDivmod row_align;
  const int32_t* topk_ids;  // [T, K]
  PlanResults plan;
};

struct RedispatchParams {
  TokenParams tokens;
  PlanOperands plan;
  int32_t num_weight_parts;  // of the call's parts, the first
};

struct BulkCopyCeilingParams {
  Call call;
  CopyPipeline ring;
  int32_t repeats;
  const void* x;    // rows[T]
  int32_t* status;  // [1]
};

struct LowLatencyDispatchParams {
  DispatchParams dispatch;
  RowSegments pieces;
  AssignmentRanges stretches;
  FastDivmod by_num_ranks;
  FastDivmod by_num_peers;  // R - 1, or 1
};

struct LowLatencyRedispatchParams {
  RedispatchParams dispatch;
  RowSegments pieces;
  FastDivmod by_num_peers;
  FastDivmod by_top_k;
};

struct LowLatencyCombineParams {
  CombineParams combine;
  RowSegments pieces;
  FastDivmod by_num_ranks;
};

enum class RowType { kBFloat16, kFloat16, kFloat32 };

#ifndef __CUDACC_RTC__
const void* DispatchKernelAddress();
const void* RedispatchKernelAddress();
const void* CombineKernelAddress(RowType type);
const void* LowLatencyDispatchKernelAddress();
const void* LowLatencyRedispatchKernelAddress();
const void* LowLatencyCombineKernelAddress(RowType type);
const void* BulkCopyCeilingKernelAddress();
#endif

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_TRANSFER_PARAMS_H_
