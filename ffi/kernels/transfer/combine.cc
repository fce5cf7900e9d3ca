#include "ffi/kernels/transfer/launch.h"
#include "ffi/kernels/transfer/preparation.h"

namespace jax_ep {
namespace {

constexpr int64_t kWarps = kCombineThreads / 32;
static_assert(kCombineSharedBytes <= kMinSharedBytes);
static_assert(kLowLatencyCombineSharedBytes <= kMinSharedBytes);

RowType ToRowType(ElementType type) {
  if (type == kBF16) return RowType::kBFloat16;
  return type == kF16 ? RowType::kFloat16 : RowType::kFloat32;
}

}  // namespace

Status PrepareCombine(const TransferCall& call, PreparedCombine* prepared) {
  if (Status status = CheckTransfer(call); !status.ok()) return status;
  if (IsQuantized(call.shape.format)) {
    return Unimplemented("rows are quantized; combine takes bf16, f16 and f32");
  }
  const RowSegments segments = PlanSegments(call);
  const Preparation preparation(call, Operation::kCombine, {.plan = true},
                                {call.has_weights, call.has_scalars, segments.count()});
  if (!preparation.status().ok()) return preparation.status();
  const CallParams& sizes = preparation.call();
  CombineParams params = {};
  params.call = sizes;
  params.has_weights = call.has_weights;
  params.has_scalars = call.has_scalars;
  params.schedule =
      CombineSchedule(sizes.num_tokens, sizes.num_ranks, sizes.wire_vectors, kMaxChunks,
                      static_cast<int32_t>(kWarps * preparation.MaxBlocks(2)));
  prepared->params = {params, segments, FastDivmod(sizes.num_ranks)};
  prepared->layout = preparation.layout();
  prepared->sizes = preparation.SizesOf(segments);
  const RowType type = ToRowType(call.shape.format.payload);
  if (call.shape.has_domains() && segments.count() > 0) {
    constexpr int64_t kSharedBytes = kLowLatencyThreads / 32 * kLowLatencySumPipelineBytes;
    const int64_t blocks = preparation.LowLatencyGrid(segments, sizes.num_all_tokens(), 0);
    prepared->launches = {{.name = "low-latency combine",
                           .kernel = HierarchicalLowLatencyCombineKernelAddress(type),
                           .blocks = preparation.Grid({sizes.num_prologue_items, blocks}, 1),
                           .threads = kLowLatencyThreads,
                           .shared_bytes = kSharedBytes}};
    return {};
  }
  if (call.shape.has_domains()) {
    const int64_t chunks = preparation.layout().num_chunks;
    prepared->launches = {
        {.name = "combine",
         .kernel = HierarchicalCombineKernelAddress(type),
         .blocks = preparation.Grid({sizes.num_prologue_items, chunks * sizes.num_ranks}, 2),
         .threads = kHierarchicalCombineThreads,
         .shared_bytes = kCombineSharedBytes}};
    return {};
  }
  if (segments.count() > 0) {
    prepared->launches = {
        {.name = "low-latency combine",
         .kernel = LowLatencyCombineKernelAddress(type),
         .blocks = preparation.LowLatencyGrid(segments, sizes.num_all_tokens(), 0),
         .threads = kLowLatencyThreads,
         .shared_bytes = kLowLatencyCombineSharedBytes}};
    return {};
  }
  prepared->launches = {
      {.name = "combine",
       .kernel = CombineKernelAddress(type),
       .blocks = preparation.Grid(
           {sizes.num_prologue_items, CeilDivide(params.schedule.num_items(), kWarps)}, 2),
       .threads = kCombineThreads,
       .shared_bytes = kCombineSharedBytes}};
  return {};
}

Status Launch(const PreparedCombine& prepared, ControlBlock* control, const CombineBuffers& buffers,
              cudaStream_t stream) {
  LowLatencyCombineParams params = prepared.params;
  CombineParams& combine = params.combine;
  combine.call.control = control;
  combine.plan = buffers.plan;
  combine.y = buffers.y;
  combine.row_weights = buffers.row_weights;
  combine.row_scalars = buffers.row_scalars;
  combine.out = buffers.out;
  combine.assignment_scalars = buffers.assignment_scalars;
  if (prepared.layout.domains.count > 0) {
    combine.plan.partial_sum_index = buffers.forwarding.partial_sum_index;
    if (prepared.sizes.segments.count() > 0) {
      const HierarchicalLowLatencyCombineParams low_latency = {combine, buffers.forwarding,
                                                               prepared.layout, prepared.sizes};
      return LaunchKernels(prepared.launches, &low_latency, stream);
    }
    const HierarchicalCombineParams hierarchical = {combine, buffers.forwarding, prepared.layout};
    return LaunchKernels(prepared.launches, &hierarchical, stream);
  }
  const bool is_general = params.segments.count() == 0;
  return LaunchKernels(prepared.launches, is_general ? static_cast<const void*>(&combine) : &params,
                       stream);
}

}  // namespace jax_ep
