// The rows of tokens in a redispatch, which the plan determines.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_PLANNED_ROWS_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_PLANNED_ROWS_CUH_

#include "ffi/device/transfer/plan_rows.cuh"

namespace jax_ep {

// Finds a token's rows in the inverted plan.
class PlannedRows {
 public:
  struct Loaded {
    int32_t unchecked[2];  // top-k indices l and l + 32
  };

  __device__ PlannedRows(const CallParams& call, const PlanOperands& plan, int32_t end)
      : call_(call), plan_(plan), end_(end) {}

  __device__ Loaded Load(int source, int token) const {
    return {{LoadUncheckedRow(call_, source, token, 0), LoadUncheckedRow(call_, source, token, 1)}};
  }

  __device__ TokenRows Rows(int source, int token, const Loaded& loaded) const {
    return CheckRows(call_, plan_, end_, source, token, loaded.unchecked);
  }

 private:
  const CallParams& call_;
  const PlanOperands& plan_;
  const int32_t end_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_PLANNED_ROWS_CUH_
