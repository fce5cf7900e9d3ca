// The parameters that dispatch and redispatch share: how tokens are sent (token_sender.cuh) and
// expanded into rows (token_expansion.cuh).
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_TOKEN_PARAMS_H_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_TOKEN_PARAMS_H_

#include "ffi/device/protocol/call_params.h"
#include "ffi/device/transfer/dispatch/arrivals.h"
#include "ffi/device/transfer/dispatch/copy_pipeline.h"
#include "ffi/device/transfer/dispatch/token_chunks.h"

namespace jax_ep {

struct TokenParams {
  CallParams call;
  CopyPipeline expand_pipeline;  // for the expand warps, the first of a block
  CopyPipeline send_pipeline;    // for the send warps, the last of a block
  int32_t num_senders;           // warps of the grid that send
  TokenChunks chunks;
  FastDivmod num_ranks_divmod;
  FastDivmod chunk_tokens_divmod;
  FastDivmod ring_slots_divmod;
  bool zero_tail;
  bool has_weights;
  const void* x;              // rows[T]
  const uint8_t* scales;      // [T, scale_bytes], or null
  const float* topk_weights;  // [T, K]
  void* rows;                 // rows[M]
  uint8_t* row_scales;        // [M, scale_bytes], or null
  float* row_weights;         // [M]
  uint64_t* arrivals;         // [1 + ceil(M / kArrivalRows)], or null; see launch.h
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_TOKEN_PARAMS_H_
