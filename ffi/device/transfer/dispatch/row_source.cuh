// Where a row of tokens is read: among the operands, or in the workspace, where its scales follow
// its payload.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_ROW_SOURCE_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_ROW_SOURCE_CUH_

#include "ffi/device/transfer/dispatch/scale_words.cuh"
#include "ffi/device/transfer/dispatch/token_params.h"

namespace jax_ep {

struct RowSource {
  const uint4* payload;
  const uint8_t* scales = nullptr;  // null: scales, if the row has any, follow the payload

  // Returns the scales, of which the row has some.
  __device__ ScaleSource Scales(const CallParams& call) const {
    if (scales != nullptr) return {scales, call.scale_bytes};
    return {reinterpret_cast<const uint8_t*>(payload + call.operand_vectors),
            4 * call.num_scale_words};
  }
};

// Returns a row of this rank's operands.
__device__ inline RowSource OperandRow(const TokenParams& params, int token) {
  const CallParams& call = params.call;
  const auto* const x = static_cast<const uint4*>(params.x);
  RowSource row = {x + int64_t{token} * call.operand_vectors};
  if (params.scales != nullptr) row.scales = params.scales + int64_t{token} * call.scale_bytes;
  return row;
}

// Returns where the scales of a row in a workspace are stored.
__device__ inline ScaleDestination ScalesInFlight(const CallParams& call, PeerPointer<uint4> row) {
  return {(row + call.operand_vectors).As<uint8_t>(), 4 * call.num_scale_words};
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_ROW_SOURCE_CUH_
