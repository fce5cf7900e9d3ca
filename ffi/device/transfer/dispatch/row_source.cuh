// Where a row of tokens is read: among the operands, or in the workspace, where its scales follow
// its payload.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_ROW_SOURCE_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_ROW_SOURCE_CUH_

#include "ffi/device/transfer/dispatch/token_params.h"

namespace jax_ep {

struct RowSource {
  const uint4* payload;
  const float* scales = nullptr;  // null: scales, if the row has any, follow the payload

  __device__ const float* Scales(int payload_vectors) const {
    return scales != nullptr ? scales : reinterpret_cast<const float*>(payload + payload_vectors);
  }
};

// Returns a row of this rank's operands.
__device__ inline RowSource OperandRow(const TokenParams& params, int token) {
  const CallParams& call = params.call;
  const auto* const x = static_cast<const uint4*>(params.x);
  RowSource row = {x + int64_t{token} * call.operand_vectors};
  if (params.scales != nullptr) row.scales = params.scales + int64_t{token} * call.num_scales;
  return row;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_ROW_SOURCE_CUH_
