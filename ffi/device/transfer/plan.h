// The arrays of a plan on the device. R ranks, L local experts, T tokens, K choices, M rows.
#ifndef JAX_EP_DEVICE_TRANSFER_PLAN_H_
#define JAX_EP_DEVICE_TRANSFER_PLAN_H_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// What dispatch writes, in the order of its results.
struct PlanResults {
  int32_t* group_sizes;        // [L]
  int32_t* real_group_sizes;   // [L]
  int32_t* row_offsets;        // [L + 1]
  int32_t* row_source;         // [M, 3]
  int32_t* partial_sum_index;  // [M]
  bool* kept;                  // [T, K]
  int32_t* destination;        // [T, K]
  int32_t* num_received;       // [1]
  int32_t* num_dropped;        // [1]
  int32_t* num_bad_ids;        // [1]
  int32_t* status;             // [1]
};

// What dispatch_by_plan and combine read of it.
struct PlanOperands {
  const int32_t* row_offsets;
  const int32_t* row_source;
  const int32_t* partial_sum_index;  // combine only
  const int32_t* destination;        // of this rank's choices
  const int32_t* status;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_PLAN_H_
