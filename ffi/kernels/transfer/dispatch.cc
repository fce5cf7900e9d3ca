#include <algorithm>

#include "ffi/kernels/transfer/launch.h"
#include "ffi/kernels/transfer/token_preparation.h"

namespace jax_ep {
namespace {

// Returns the shared memory of a low-latency dispatch over several domains.
int64_t HierarchicalSharedBytes(int64_t num_ranks, int64_t num_experts) {
  return TileCountBytes(num_experts) + QuotaBytes(num_ranks, num_experts);
}

RowSegments PlanDispatchSegments(const TransferCall& call) {
  const TransferShape& shape = call.shape;
  const RowSegments segments = PlanSegments(call);
  const int64_t assignments = shape.num_tokens * shape.top_k;
  const int64_t bytes = shape.has_domains()
                            ? HierarchicalSharedBytes(shape.num_ranks, shape.num_experts)
                            : BlockPlanBytes(shape.num_ranks, assignments, shape.num_experts);
  return segments.count() > 0 && bytes <= kMinSharedBytes ? segments : RowSegments();
}

}  // namespace

Status PrepareDispatch(const TransferCall& call, PreparedDispatch* prepared) {
  if (Status status = CheckTransfer(call); !status.ok()) return status;
  const RowSegments segments = PlanDispatchSegments(call);
  const Preparation preparation(
      call, Operation::kDispatch, {.tiles = true},
      {call.row_align, call.zero_tail, call.has_weights, segments.count(), call.ring_chunks});
  if (!preparation.status().ok()) return preparation.status();
  const CallParams& sizes = preparation.call();
  TokenParams tokens;
  Status status =
      MakeTokenParams(preparation, call, QuotaBytes(sizes.num_ranks, sizes.num_experts), &tokens);
  if (!status.ok()) return status;
  prepared->params = {{tokens, FastDivmod(static_cast<int32_t>(call.row_align)), nullptr, {}},
                      segments,
                      PlanAssignmentRanges(sizes.num_ranks, sizes.num_assignments()),
                      FastDivmod(sizes.num_ranks),
                      FastDivmod(std::max(1, sizes.num_ranks - 1))};
  prepared->layout = preparation.layout();
  prepared->sizes = preparation.SizesOf(segments);
  if (segments.count() == 0) {
    const void* const kernel =
        call.shape.has_domains() ? HierarchicalDispatchKernelAddress() : DispatchKernelAddress();
    prepared->launches = {TokenLaunch("dispatch", kernel, preparation, tokens)};
    return {};
  }
  const unsigned blocks =
      preparation.LowLatencyGrid(segments, sizes.num_all_tokens(), sizes.num_rows);
  if (call.shape.has_domains()) {
    // One block counts all assignments of this rank.
    CallParams& counted = prepared->params.dispatch.tokens.call;
    counted.num_tiles = 1;
    counted.tile_assignments =
        CeilDivide(sizes.num_assignments(), kTileAssignments) * kTileAssignments;
    prepared->launches = {{.name = "low-latency dispatch",
                           .kernel = HierarchicalLowLatencyDispatchKernelAddress(),
                           .blocks = blocks,
                           .threads = kLowLatencyThreads,
                           .shared_bytes = static_cast<size_t>(HierarchicalSharedBytes(
                               call.shape.num_ranks, call.shape.num_experts))}};
    return {};
  }
  prepared->launches = {{.name = "low-latency dispatch",
                         .kernel = LowLatencyDispatchKernelAddress(),
                         .blocks = blocks,
                         .threads = kLowLatencyThreads,
                         .shared_bytes = static_cast<size_t>(BlockPlanBytes(
                             sizes.num_ranks, sizes.num_assignments(), sizes.num_experts))}};
  return {};
}

Status Launch(const PreparedDispatch& prepared, ControlBlock* control,
              const DispatchBuffers& buffers, cudaStream_t stream) {
  LowLatencyDispatchParams params = prepared.params;
  BindTokens(control, buffers, &params.dispatch.tokens);
  params.dispatch.topk_ids = buffers.topk_ids;
  params.dispatch.plan = buffers.plan;
  if (prepared.sizes.segments.count() > 0) {
    const HierarchicalLowLatencyDispatchParams low_latency = {params.dispatch, buffers.forwarding,
                                                              prepared.layout, prepared.sizes};
    return LaunchKernels(prepared.launches, &low_latency, stream);
  }
  if (prepared.layout.domains.count > 0) {
    const HierarchicalDispatchParams hierarchical = {params.dispatch, buffers.forwarding,
                                                     prepared.layout, kSendBlocks};
    return LaunchKernels(prepared.launches, &hierarchical, stream);
  }
  const bool is_general = params.segments.count() == 0;
  return LaunchKernels(prepared.launches,
                       is_general ? static_cast<const void*>(&params.dispatch) : &params, stream);
}

}  // namespace jax_ep
