// The kernels of a transfer: what each is given, and its address for the launch.
//
//   dispatch          publish, plan, place, pull
//   dispatch_by_plan  publish, pull
//   combine           index, reduce, sum
#ifndef JAX_EP_KERNELS_STAGES_H_
#define JAX_EP_KERNELS_STAGES_H_

#include "ffi/device/call.h"
#include "ffi/device/plan.h"

namespace jax_ep {

// Threads of a block. Two blocks of the first kind fit on a multiprocessor, eight of the second.
inline constexpr int kThreads = 512;
inline constexpr int kPlaceThreads = 256;

// A choice is one lane's, twice.
inline constexpr int kMaxTopK = 64;

struct PublishStage {
  Call call;
  const void* x;              // rows[T]
  const float* topk_weights;  // [T, K] or null
  const int32_t* topk_ids;    // [T, K]; dispatch only
  PlanOperands plan;          // dispatch_by_plan only
};

struct PlanStage {
  Call call;
  int32_t row_align;
  PlanResults plan;
};

struct PullStage {
  Call call;
  bool zero_tail;
  bool has_weights;
  PlanOperands plan;
  const void* x;              // rows[T], this rank's
  const float* topk_weights;  // [T, K], this rank's
  void* rows;                 // rows[M]
  float* row_weights;         // [M]
};

struct IndexStage {
  Call call;
  PlanOperands plan;
};

struct ReduceStage {
  Call call;
  bool has_weights;
  bool has_scalars;
  PlanOperands plan;
  const void* y;             // rows[M]
  const float* row_weights;  // [M]
  const float* row_scalars;  // [M]
};

struct SumStage {
  Call call;
  bool has_scalars;
  PlanOperands plan;
  void* out;              // rows[T]
  float* choice_scalars;  // [T, K]
};

enum class RowType { kBFloat16, kFloat16, kFloat32 };

#ifndef __CUDACC_RTC__
const void* PublishKernelAddress();
const void* PlanKernelAddress();
const void* PlaceKernelAddress();  // of a PlanStage
const void* PullKernelAddress();
const void* IndexKernelAddress();
const void* ReduceKernelAddress(RowType type);
const void* SumKernelAddress(RowType type);
#endif

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_STAGES_H_
