// The kernels of the transfers: what each is given, and its address for the launch.
#ifndef JAX_EP_KERNELS_STAGES_H_
#define JAX_EP_KERNELS_STAGES_H_

#include "ffi/device/call.h"
#include "ffi/device/combine_tickets.h"
#include "ffi/device/plan.h"
#include "ffi/device/pull_stage.h"

namespace jax_ep {

// Threads of a block. Two of combine fit on a multiprocessor, one of dispatch.
inline constexpr int kCombineThreads = 384;
inline constexpr int kDispatchThreads = 256;

// A choice is one lane's, twice.
inline constexpr int kMaxTopK = 64;

// Choices of a tile: as many for each warp, some for each lane.
inline constexpr int kTileChoices = 1024;
static_assert(kTileChoices % kDispatchThreads == 0);

struct DispatchStage {
  PullStage pull;
  int32_t row_align;
  const int32_t* topk_ids;  // [T, K]
  PlanResults plan;
};

struct DispatchByPlanStage {
  PullStage pull;
  PlanOperands plan;
};

struct CeilingStage {
  Call call;
  CopyRing ring;
  int32_t repeats;
  const void* x;    // rows[T]
  int32_t* status;  // [1]
};

struct CombineStage {
  Call call;
  bool has_weights;
  bool has_scalars;
  CombineTickets tickets;
  PlanOperands plan;
  const void* y;             // rows[M]
  const float* row_weights;  // [M]
  const float* row_scalars;  // [M]
  void* out;                 // rows[T]
  float* choice_scalars;     // [T, K]
};

enum class RowType { kBFloat16, kFloat16, kFloat32 };

#ifndef __CUDACC_RTC__
const void* DispatchKernelAddress();
const void* DispatchByPlanKernelAddress();
const void* CombineKernelAddress(RowType type);
const void* CeilingKernelAddress();
#endif

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_STAGES_H_
