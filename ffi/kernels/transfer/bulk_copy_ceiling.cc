#include <algorithm>

#include "ffi/kernels/transfer/launch.h"
#include "ffi/kernels/transfer/token_preparation.h"

namespace jax_ep {

Status PrepareBulkCopyCeiling(const TransferCall& call, PreparedBulkCopyCeiling* prepared) {
  const Preparation preparation(call, Operation::kBulkCopyCeiling, {}, {call.repeats});
  RowCopySupport support;
  Status status = preparation.status();
  if (status.ok()) status = FindRowCopySupport(&support);
  if (!status.ok()) return status;
  const CallParams& sizes = preparation.call();
  CopyPipeline pipeline = {.num_warps = kDispatchWarps};
  if (support.has_bulk_copies) {
    pipeline = PlanCopyPipeline(sizes.wire_vectors, 1, kDispatchWarps,
                                std::min(support.shared_bytes, kMaxPipelineBytes));
  }
  prepared->params = {sizes, pipeline, static_cast<int32_t>(call.repeats), nullptr, nullptr};
  prepared->launches = {
      {.name = "bulk_copy_ceiling",
       .kernel = BulkCopyCeilingKernelAddress(),
       .blocks = preparation.Grid({CeilDivide(sizes.num_tokens, pipeline.num_warps)}, 1),
       .threads = kDispatchThreads,
       .shared_bytes = static_cast<size_t>(PipelineBytes(pipeline))}};
  return {};
}

Status Launch(const PreparedBulkCopyCeiling& prepared, ControlBlock* control,
              const BulkCopyCeilingBuffers& buffers, cudaStream_t stream) {
  BulkCopyCeilingParams params = prepared.params;
  params.call.control = control;
  params.x = buffers.x;
  params.status = buffers.status;
  return LaunchKernels(prepared.launches, &params, stream);
}

}  // namespace jax_ep
