// The shared memory pipelines of row copies (row_copies.cuh): each warp has a ring of stages, and a
// row in flight occupies one or several of them.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_COPY_PIPELINE_H_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_COPY_PIPELINE_H_

#include "ffi/device/common/integers.h"
#include "ffi/device/common/limits.h"

namespace jax_ep {

inline constexpr int kMaxCopyStages = 8;

// The pipelines of some warps of a block, one after another in shared memory.
struct CopyPipeline {
  int32_t shared_offset = 0;  // in bytes: where they begin
  int32_t num_warps = 0;
  int32_t num_stages = 0;         // per warp, 3 or more; 0: no pipeline, rows go through registers
  int32_t stage_vectors = 0;      // 16-byte vectors per stage
  int32_t max_destinations = 0;   // per row
  int32_t destination_bytes = 8;  // an address, and with scales of results the index of a row
};

// The state of one warp's pipeline. It follows the stages in shared memory. The addresses of each
// stage's destinations follow it.
struct alignas(16) CopyPipelineState {
  uint64_t full[kMaxCopyStages];         // mbarriers: the stage is loaded
  int32_t first_vector[kMaxCopyStages];  // within the row
  int32_t num_vectors[kMaxCopyStages];
  int32_t num_destinations[kMaxCopyStages];
};

// Returns the bytes of shared memory per warp.
JAX_EP_HOST_DEVICE constexpr int32_t CopyPipelineBytes(const CopyPipeline& pipeline) {
  if (pipeline.num_stages == 0) return 0;
  const auto stage_bytes = static_cast<int32_t>(pipeline.stage_vectors * kVectorBytes);
  const int32_t bytes =
      pipeline.num_stages * (stage_bytes + pipeline.max_destinations * pipeline.destination_bytes) +
      static_cast<int32_t>(sizeof(CopyPipelineState));
  return CeilDivide(bytes, 128) * 128;
}

// Halves the stages until the pipelines fit, but not below `min_vectors`.
constexpr CopyPipeline ShrinkStages(CopyPipeline pipeline, int32_t min_vectors,
                                    int32_t shared_bytes) {
  while (pipeline.stage_vectors > min_vectors &&
         pipeline.num_warps * CopyPipelineBytes(pipeline) > shared_bytes) {
    pipeline.stage_vectors = Max(CeilDivide(pipeline.stage_vectors, 2), min_vectors);
  }
  return pipeline;
}

// Adds stages while they fit.
constexpr CopyPipeline DeepenPipeline(CopyPipeline pipeline, int32_t shared_bytes) {
  while (pipeline.num_stages < kMaxCopyStages) {
    CopyPipeline deeper = pipeline;
    ++deeper.num_stages;
    if (deeper.num_warps * CopyPipelineBytes(deeper) > shared_bytes) break;
    pipeline = deeper;
  }
  return pipeline;
}

// Plans for throughput: a stage is a whole row, or an equal share of a long row. Then as many warps
// as fit, then as many stages.
constexpr CopyPipeline PlanCopyPipeline(int64_t row_vectors, int32_t max_destinations,
                                        int32_t max_warps, int32_t shared_bytes,
                                        bool stores_scales = false) {
  constexpr int32_t kMaxStageVectors = 512;  // 8 KB
  constexpr int32_t kMinStages = 3;
  CopyPipeline pipeline = {0, 1, kMinStages, 1, max_destinations, stores_scales ? 12 : 8};
  const int64_t stages_per_row = CeilDivide(row_vectors, kMaxStageVectors);
  if (stages_per_row > 0) {
    pipeline.stage_vectors = static_cast<int32_t>(CeilDivide(row_vectors, stages_per_row));
  }
  pipeline = ShrinkStages(pipeline, 1, shared_bytes);
  while (pipeline.num_warps < max_warps &&
         (pipeline.num_warps + 1) * CopyPipelineBytes(pipeline) <= shared_bytes) {
    ++pipeline.num_warps;
  }
  return DeepenPipeline(pipeline, shared_bytes);
}

// Plans for `num_warps` warps, or fewer if they do not fit, that have one row in flight each. A
// stage is a quarter of a row, or less if it does not fit.
constexpr CopyPipeline PlanSendPipeline(int64_t row_vectors, int32_t max_destinations,
                                        int32_t num_warps, int32_t shared_bytes) {
  constexpr int32_t kMinStageVectors = 192;  // 3 KB
  constexpr int64_t kMaxStageVectors = 1024;
  const auto quarter = static_cast<int32_t>(Min(CeilDivide(row_vectors, 4), kMaxStageVectors));
  CopyPipeline pipeline = {0, num_warps, 3, quarter, max_destinations};
  if (pipeline.stage_vectors < kMinStageVectors) {
    pipeline.stage_vectors = static_cast<int32_t>(Min(row_vectors, kMinStageVectors));
  }
  pipeline = ShrinkStages(pipeline, kMinStageVectors, shared_bytes);
  while (pipeline.num_warps > 1 &&
         pipeline.num_warps * CopyPipelineBytes(pipeline) > shared_bytes) {
    --pipeline.num_warps;
  }
  return ShrinkStages(pipeline, 1, shared_bytes);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_COPY_PIPELINE_H_
