// The parameters that the combine kernels share.
#ifndef JAX_EP_DEVICE_TRANSFER_COMBINE_PARAMS_H_
#define JAX_EP_DEVICE_TRANSFER_COMBINE_PARAMS_H_

#include "ffi/device/protocol/call_params.h"
#include "ffi/device/transfer/combine/schedule.h"
#include "ffi/device/transfer/plan.h"

namespace jax_ep {

struct CombineParams {
  CallParams call;
  bool has_weights;
  bool has_scalars;
  CombineSchedule schedule;
  PlanOperands plan;
  const void* y;              // rows[M]
  const float* row_weights;   // [M]
  const float* row_scalars;   // [M]
  void* out;                  // rows[T]
  float* assignment_scalars;  // [T, K]
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_COMBINE_PARAMS_H_
