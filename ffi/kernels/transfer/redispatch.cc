#include <algorithm>

#include "ffi/kernels/transfer/launch.h"
#include "ffi/kernels/transfer/token_preparation.h"

namespace jax_ep {

Status PrepareRedispatch(const TransferCall& call, PreparedRedispatch* prepared) {
  if (Status status = CheckTransfer(call); !status.ok()) return status;
  const RowSegments segments = PlanSegments(call);
  const Preparation preparation(
      call, Operation::kRedispatch, {.tiles = call.has_weights, .plan = true},
      {call.zero_tail, call.has_weights, segments.count(), call.ring_chunks});
  if (!preparation.status().ok()) return preparation.status();
  const CallParams& sizes = preparation.call();
  TokenParams tokens;
  Status status = MakeTokenParams(preparation, call, 0, &tokens);
  if (!status.ok()) return status;
  prepared->params = {{tokens, {}, call.has_weights ? sizes.num_tiles : 0},
                      segments,
                      FastDivmod(std::max(1, sizes.num_ranks - 1)),
                      FastDivmod(sizes.top_k)};
  prepared->layout = preparation.layout();
  prepared->sizes = preparation.SizesOf(segments);
  if (segments.count() == 0) {
    const void* const kernel = call.shape.has_domains() ? HierarchicalRedispatchKernelAddress()
                                                        : RedispatchKernelAddress();
    prepared->launches = {TokenLaunch("redispatch", kernel, preparation, tokens)};
    return {};
  }
  // All ranks' tokens, or the average number of rows here.
  const int64_t rows = std::max(sizes.num_all_tokens(), sizes.num_assignments());
  prepared->launches = {{.name = "low-latency redispatch",
                         .kernel = call.shape.has_domains()
                                       ? HierarchicalLowLatencyRedispatchKernelAddress()
                                       : LowLatencyRedispatchKernelAddress(),
                         .blocks = preparation.LowLatencyGrid(segments, rows, sizes.num_rows),
                         .threads = kLowLatencyThreads,
                         .shared_bytes = 0}};
  return {};
}

Status Launch(const PreparedRedispatch& prepared, ControlBlock* control,
              const RedispatchBuffers& buffers, cudaStream_t stream) {
  LowLatencyRedispatchParams params = prepared.params;
  BindTokens(control, buffers, &params.dispatch.tokens);
  params.dispatch.plan = buffers.plan;
  if (prepared.sizes.segments.count() > 0) {
    const HierarchicalLowLatencyRedispatchParams low_latency = {
        params.dispatch, buffers.forwarding, prepared.layout, prepared.sizes, params.top_k_divmod};
    return LaunchKernels(prepared.launches, &low_latency, stream);
  }
  if (prepared.layout.domains.count > 0) {
    const HierarchicalRedispatchParams hierarchical = {params.dispatch, buffers.forwarding,
                                                       prepared.layout, kSendBlocks};
    return LaunchKernels(prepared.launches, &hierarchical, stream);
  }
  const bool is_general = params.segments.count() == 0;
  return LaunchKernels(prepared.launches,
                       is_general ? static_cast<const void*>(&params.dispatch) : &params, stream);
}

}  // namespace jax_ep
