#include "ffi/kernels/transfer/token_preparation.h"

#include <algorithm>
#include <cmath>

namespace jax_ep {
namespace {

constexpr int32_t kMaxSendWarps = (kMaxDispatchThreads - kDispatchThreads) / 32;

// Returns the number of send warps: they have a few MB in flight, which keeps the links busy. With
// more, the flags and counts that all ranks wait for would queue behind the rows.
int64_t CountSenders(const CallParams& call) {
  constexpr double kBytesInFlight = 3.5 * (1 << 20);
  if (call.num_ranks == 1) return 0;
  // The expected number of peers per token, for uniform routing.
  const double peers = (call.num_ranks - 1) * (1 - std::pow(1 - 1.0 / call.num_ranks, call.top_k));
  const double bytes = static_cast<double>(call.wire_vectors * kVectorBytes) * peers;
  return static_cast<int64_t>(std::ceil(std::min(kBytesInFlight / bytes, 1e6)));
}

}  // namespace

// The send pipelines also lie behind the counts of a tile, because send warps begin before these
// are free.
Status MakeTokenParams(const Preparation& preparation, const TransferCall& call,
                       int64_t shared_offset, TokenParams* tokens) {
  RowCopySupport support;
  if (Status status = FindRowCopySupport(&support); !status.ok()) return status;
  const CallParams& params = preparation.call();
  const int64_t bytes = std::min(support.shared_bytes, kMaxPipelineBytes) - shared_offset;
  const int64_t senders = CountSenders(params);
  // With several domains the send warps of a few blocks send, which finishes chunks soon.
  const int32_t send_warps = static_cast<int32_t>(
      call.shape.has_domains()
          ? kMaxSendWarps
          : std::min<int64_t>(CeilDivide(senders, preparation.num_sms()), kMaxSendWarps));
  CopyPipeline expand = {.num_warps = kDispatchWarps};
  CopyPipeline send = {.num_warps = send_warps};
  if (support.has_bulk_copies) {
    const auto send_bytes = static_cast<int32_t>(bytes / (call.shape.has_domains() ? 2 : 4));
    send = PlanSendPipeline(params.wire_vectors, std::min(params.num_ranks, 64), send_warps,
                            send_bytes);
    if (call.shape.has_domains()) send = DeepenPipeline(send, send_bytes);
    expand =
        PlanCopyPipeline(params.wire_vectors, params.top_k, kDispatchWarps,
                         static_cast<int32_t>(bytes) - send.num_warps * CopyPipelineBytes(send),
                         params.scale_bytes > 0);
  }
  expand.shared_offset = static_cast<int32_t>(shared_offset);
  send.shared_offset =
      static_cast<int32_t>(std::max(PipelineBytes(expand), TileCountBytes(params.num_experts)));
  const TokenChunks chunks = PlanTokenChunks(params.num_tokens, params.wire_vectors * kVectorBytes,
                                             params.num_ranks, params.top_k, call.ring_chunks);
  *tokens = {.call = params,
             .expand_pipeline = expand,
             .send_pipeline = send,
             .num_senders = static_cast<int32_t>(senders),
             .chunks = chunks,
             .num_ranks_divmod = FastDivmod(params.num_ranks),
             .chunk_tokens_divmod = FastDivmod(chunks.tokens),
             .ring_slots_divmod = FastDivmod(std::max(chunks.ring_slots, 1)),
             .zero_tail = call.zero_tail,
             .has_weights = call.has_weights,
             .x = nullptr,
             .scales = nullptr,
             .topk_weights = nullptr,
             .rows = nullptr,
             .row_scales = nullptr,
             .row_weights = nullptr,
             .arrivals = nullptr};
  return {};
}

KernelLaunch TokenLaunch(const char* name, const void* kernel, const Preparation& preparation,
                         const TokenParams& tokens) {
  const CallParams& call = tokens.call;
  const unsigned blocks =
      preparation.Grid({call.num_prologue_items, CeilDivide(call.num_tokens, kMaxSendWarps),
                        CeilDivide(call.num_all_tokens(), tokens.expand_pipeline.num_warps),
                        CeilDivide(call.num_rows, 32 * kDispatchWarps)},
                       1);
  return {.name = name,
          .kernel = kernel,
          .blocks = blocks,
          .threads = static_cast<unsigned>(kDispatchThreads + 32 * tokens.send_pipeline.num_warps),
          .shared_bytes = static_cast<size_t>(PipelineBytes(tokens.send_pipeline))};
}

}  // namespace jax_ep
