// The parameters of each transfer kernel, and its address for the launch.
#ifndef JAX_EP_KERNELS_TRANSFER_PARAMS_H_
#define JAX_EP_KERNELS_TRANSFER_PARAMS_H_

#include "ffi/device/transfer/combine/params.h"
#include "ffi/device/transfer/dispatch/token_params.h"
#include "ffi/device/transfer/hierarchical/combine_params.h"
#include "ffi/device/transfer/hierarchical/low_latency/layout.h"
#include "ffi/device/transfer/low_latency/layout.h"
#include "ffi/device/transfer/plan.h"

namespace jax_ep {

// Threads per block. Two blocks of combine fit on an SM, and one of dispatch.
inline constexpr int kCombineThreads = 384;
inline constexpr int kHierarchicalCombineThreads = kCombineThreads + 32;  // one warp takes items
inline constexpr int kDispatchThreads = 256;  // the expand warps; send warps follow
inline constexpr int kMaxDispatchThreads = kDispatchThreads + 128;

// Threads per block of the low-latency kernels.
inline constexpr int kLowLatencyThreads = 512;

// Shared memory per warp of combine (row_sums.cuh), and of low-latency combine.
inline constexpr int kSumPipelineBytes = 8 * 1024;
inline constexpr int kLowLatencySumPipelineBytes = 4 * 1024;

// Dynamic shared memory of combine, and of low-latency combine.
inline constexpr int kCombineSharedBytes = kCombineThreads / 32 * kSumPipelineBytes;
inline constexpr int kLowLatencyCombineSharedBytes =
    kLowLatencyThreads / 32 * kLowLatencySumPipelineBytes +
    kMaxLowLatencyAssignments * int{sizeof(int32_t)};

// The threads of a block of a low-latency dispatch over several domains that count; the others
// send.
inline constexpr int kCountingThreads = 32 * kCountingWarps;

// Blocks whose send warps send in calls over several domains: enough to keep the links busy.
inline constexpr int kSendBlocks = 64;

// The counts of a tile in shared memory: pairs for each of the warps that count.
JAX_EP_HOST_DEVICE constexpr int64_t TileCountBytes(int64_t num_experts) {
  return kDispatchThreads / 32 * CountPairs(static_cast<int32_t>(num_experts)) *
         int64_t{2 * sizeof(int32_t)};
}
static_assert(kCountingThreads == kDispatchThreads);

// A tile has a multiple of this many assignments.
inline constexpr int kTileAssignments = 1024;
static_assert(kTileAssignments % kDispatchThreads == 0, "all lanes have equally many");

inline constexpr int kStartGenerationThreads = 128;

struct StartGenerationParams {
  ControlBlock* control;
  const GenerationState* next;
};

struct DispatchParams {
  TokenParams tokens;
  FastDivmod row_align;
  const int32_t* topk_ids;  // [T, K]
  PlanResults plan;
};

struct RedispatchParams {
  TokenParams tokens;
  PlanOperands plan;
  int32_t num_weight_items;  // the first of the call's prologue items
};

struct BulkCopyCeilingParams {
  CallParams call;
  CopyPipeline pipeline;
  int32_t repeats;
  const void* x;    // rows[T]
  int32_t* status;  // [1]
};

struct LowLatencyDispatchParams {
  DispatchParams dispatch;
  RowSegments segments;
  AssignmentRanges ranges;
  FastDivmod num_ranks_divmod;
  FastDivmod num_peers_divmod;  // divides by R - 1, or 1
};

struct LowLatencyRedispatchParams {
  RedispatchParams dispatch;
  RowSegments segments;
  FastDivmod num_peers_divmod;
  FastDivmod top_k_divmod;
};

struct LowLatencyCombineParams {
  CombineParams combine;
  RowSegments segments;
  FastDivmod num_ranks_divmod;
};

// Calls over several NVLink domains.
struct HierarchicalDispatchParams {
  DispatchParams dispatch;
  ForwardingResults forwarding;
  HierarchicalLayout layout;
  int32_t num_send_blocks;  // blocks whose send warps send
};

struct HierarchicalRedispatchParams {
  RedispatchParams redispatch;
  ForwardingOperands forwarding;
  HierarchicalLayout layout;
  int32_t num_send_blocks;
};

// Low-latency calls over several NVLink domains.
struct HierarchicalLowLatencyDispatchParams {
  DispatchParams dispatch;
  ForwardingResults forwarding;
  HierarchicalLayout layout;
  HierarchicalSegments sizes;
};

struct HierarchicalLowLatencyRedispatchParams {
  RedispatchParams redispatch;
  ForwardingOperands forwarding;
  HierarchicalLayout layout;
  HierarchicalSegments sizes;
  FastDivmod top_k_divmod;
};

struct HierarchicalLowLatencyCombineParams {
  CombineParams combine;  // its plan.partial_sum_index is that in the domain
  ForwardingOperands forwarding;
  HierarchicalLayout layout;
  HierarchicalSegments sizes;
};

// The parameters that all transfers share.
inline const CallParams& CallOf(const LowLatencyDispatchParams& params) {
  return params.dispatch.tokens.call;
}
inline const CallParams& CallOf(const LowLatencyRedispatchParams& params) {
  return params.dispatch.tokens.call;
}
inline const CallParams& CallOf(const LowLatencyCombineParams& params) {
  return params.combine.call;
}
inline const CallParams& CallOf(const BulkCopyCeilingParams& params) { return params.call; }

enum class RowType { kBFloat16, kFloat16, kFloat32 };

#ifndef __CUDACC_RTC__
const void* StartGenerationKernelAddress();
const void* DispatchKernelAddress();
const void* RedispatchKernelAddress();
const void* CombineKernelAddress(RowType type);
const void* LowLatencyDispatchKernelAddress();
const void* LowLatencyRedispatchKernelAddress();
const void* LowLatencyCombineKernelAddress(RowType type);
const void* BulkCopyCeilingKernelAddress();
const void* HierarchicalDispatchKernelAddress();
const void* HierarchicalRedispatchKernelAddress();
const void* HierarchicalCombineKernelAddress(RowType type);
const void* HierarchicalLowLatencyDispatchKernelAddress();
const void* HierarchicalLowLatencyRedispatchKernelAddress();
const void* HierarchicalLowLatencyCombineKernelAddress(RowType type);
#endif

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_TRANSFER_PARAMS_H_
