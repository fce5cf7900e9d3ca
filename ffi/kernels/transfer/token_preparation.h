// Shared by the preparation of dispatch and redispatch: how a block's warps and shared memory are
// divided between sending and expanding.
#ifndef JAX_EP_KERNELS_TRANSFER_TOKEN_PREPARATION_H_
#define JAX_EP_KERNELS_TRANSFER_TOKEN_PREPARATION_H_

#include <cstdint>

#include "ffi/kernels/transfer/preparation.h"

namespace jax_ep {

inline constexpr int32_t kDispatchWarps = kDispatchThreads / 32;

// The shared memory of a dispatch has the quotas, followed by the pipelines. Earlier it has the
// counts of a tile in their place (TileCountBytes).
constexpr int64_t QuotaBytes(int64_t num_ranks, int64_t num_experts) {
  return CeilDivide(QuotaWords(num_ranks, num_experts), 32) * 128;
}
static_assert(TileCountBytes(kMaxExperts) <= kMinSharedBytes * 3 / 4);
static_assert(QuotaBytes(1, kMaxExperts) <= kMinSharedBytes * 3 / 4);

// Makes the parameters that dispatch and redispatch share. Pipelines begin at `shared_offset`.
Status MakeTokenParams(const Preparation& preparation, const TransferCall& call,
                       int64_t shared_offset, TokenParams* tokens);

// The launch of a general kernel.
KernelLaunch TokenLaunch(const char* name, const void* kernel, const Preparation& preparation,
                         const TokenParams& tokens);

// Binds the addresses that dispatch and redispatch share.
template <typename Buffers>
void BindTokens(ControlBlock* control, const Buffers& buffers, TokenParams* tokens) {
  tokens->call.control = control;
  tokens->x = buffers.x;
  if (tokens->call.scale_bytes > 0) tokens->scales = static_cast<const uint8_t*>(buffers.scales);
  if (tokens->has_weights) tokens->topk_weights = buffers.topk_weights;
  tokens->rows = buffers.rows;
  if (tokens->call.scale_bytes > 0) tokens->row_scales = static_cast<uint8_t*>(buffers.row_scales);
  tokens->row_weights = buffers.row_weights;
  tokens->arrivals = buffers.arrivals;
}

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_TRANSFER_TOKEN_PREPARATION_H_
