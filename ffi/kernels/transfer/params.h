// The kernels of the transfers: what each is given, and its address for the launch.
#ifndef JAX_EP_KERNELS_TRANSFER_PARAMS_H_
#define JAX_EP_KERNELS_TRANSFER_PARAMS_H_

#include "ffi/device/transfer/combine_params.h"
#include "ffi/device/transfer/low_latency/layout.h"
#include "ffi/device/transfer/plan.h"
#include "ffi/device/transfer/token_params.h"

namespace jax_ep {

// Threads of a block. Two of combine fit on a multiprocessor, one of dispatch.
inline constexpr int kCombineThreads = 384;
inline constexpr int kDispatchThreads = 256;  // besides those that send
inline constexpr int kMostDispatchThreads = kDispatchThreads + 128;

// Of the kernels for small calls.
inline constexpr int kSmallThreads = 512;

// Of shared memory, for each warp of combine (row_sums.cuh), and of a small one.
inline constexpr int kSumRingBytes = 8 * 1024;
inline constexpr int kSmallSumRingBytes = 4 * 1024;

// A choice is one lane's, twice.
inline constexpr int kMaxTopK = 64;

// Choices of a tile: as many for each warp, some for each lane.
inline constexpr int kTileChoices = 1024;
static_assert(kTileChoices % kDispatchThreads == 0);

struct DispatchStage {
  TokenStage tokens;
  Divisor row_align;
  const int32_t* topk_ids;  // [T, K]
  PlanResults plan;
};

struct DispatchByPlanStage {
  TokenStage tokens;
  PlanOperands plan;
  int32_t num_weight_parts;  // of the call's parts, the first
};

struct CeilingStage {
  Call call;
  CopyRing ring;
  int32_t repeats;
  const void* x;    // rows[T]
  int32_t* status;  // [1]
};

struct SmallDispatchStage {
  DispatchStage dispatch;
  SmallPieces pieces;
  SmallStretches stretches;
  Divisor by_num_ranks;
  Divisor by_num_peers;  // R - 1, or 1
};

struct SmallDispatchByPlanStage {
  DispatchByPlanStage dispatch;
  SmallPieces pieces;
  Divisor by_num_peers;
  Divisor by_top_k;
};

struct SmallCombineStage {
  CombineStage combine;
  SmallPieces pieces;
  Divisor by_num_ranks;
};

enum class RowType { kBFloat16, kFloat16, kFloat32 };

#ifndef __CUDACC_RTC__
const void* DispatchKernelAddress();
const void* DispatchByPlanKernelAddress();
const void* CombineKernelAddress(RowType type);
const void* DispatchSmallKernelAddress();
const void* DispatchByPlanSmallKernelAddress();
const void* CombineSmallKernelAddress(RowType type);
const void* CeilingKernelAddress();
#endif

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_TRANSFER_PARAMS_H_
