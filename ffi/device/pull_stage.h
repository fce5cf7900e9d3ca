// What both dispatches are given for their last part, see pull.cuh.
#ifndef JAX_EP_DEVICE_PULL_STAGE_H_
#define JAX_EP_DEVICE_PULL_STAGE_H_

#include "ffi/device/call.h"
#include "ffi/device/copy_ring.h"

namespace jax_ep {

struct PullStage {
  Call call;
  CopyRing ring;
  bool zero_tail;
  bool has_weights;
  bool is_in_place;           // peers read x and topk_weights themselves, not copies
  const void* x;              // rows[T]
  const float* topk_weights;  // [T, K]
  void* rows;                 // rows[M]
  float* row_weights;         // [M]
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PULL_STAGE_H_
