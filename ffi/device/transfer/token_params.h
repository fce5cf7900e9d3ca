// What both dispatches are given for their tokens, see token_sends.cuh and token_expansion.cuh.
#ifndef JAX_EP_DEVICE_TRANSFER_TOKEN_PARAMS_H_
#define JAX_EP_DEVICE_TRANSFER_TOKEN_PARAMS_H_

#include "ffi/device/protocol/call.h"
#include "ffi/device/transfer/copy_pipeline.h"
#include "ffi/device/transfer/token_chunks.h"

namespace jax_ep {

// Rows that a counter of arrivals is for: a tile of a matmul reads one or two.
inline constexpr int kArrivalRows = 128;

struct TokenParams {
  Call call;
  CopyPipeline expansions;  // of the first warps of a block
  CopyPipeline sends;       // of the last
  int32_t num_senders;      // warps of the grid that send
  TokenChunks chunks;
  bool zero_tail;
  bool has_weights;
  const void* x;              // rows[T]
  const float* topk_weights;  // [T, K]
  void* rows;                 // rows[M]
  float* row_weights;         // [M]
  uint32_t* arrivals;         // [1 + ceil(M / kArrivalRows)], or null; see transfer.h
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_TOKEN_PARAMS_H_
