// How the shared memory of a block is cut into rings of stages for rows on their way.
#ifndef JAX_EP_DEVICE_TRANSFER_COPY_PIPELINE_H_
#define JAX_EP_DEVICE_TRANSFER_COPY_PIPELINE_H_

#include "ffi/device/common/integers.h"

namespace jax_ep {

inline constexpr int kMaxCopyStages = 8;

// Of each of some warps of a block.
struct CopyPipeline {
  int32_t first_byte;  // of shared memory: before it is something else
  int32_t num_warps;
  int32_t num_stages;     // 3 or more; 0: there are none, rows go through registers
  int32_t stage_vectors;  // of 16 bytes
  int32_t num_places;     // that a row goes to, at most
};

// What is in each stage. Of one warp, after its stages; the places of each stage's row follow.
struct alignas(16) CopyPipelineState {
  uint64_t loaded[kMaxCopyStages];  // barriers
  int32_t first[kMaxCopyStages];    // chunk of the row
  int32_t count[kMaxCopyStages];
  int32_t num_places[kMaxCopyStages];
};

// Bytes of shared memory of a warp.
JAX_EP_HOST_DEVICE constexpr int32_t CopyPipelineBytes(const CopyPipeline& ring) {
  if (ring.num_stages == 0) return 0;
  const int32_t bytes = ring.num_stages * (ring.stage_vectors * 16 + ring.num_places * 8) +
                        static_cast<int32_t>(sizeof(CopyPipelineState));
  return CeilDivide(bytes, 128) * 128;
}

// With stages halved until it fits, or down to so few chunks.
constexpr CopyPipeline ShrinkStages(CopyPipeline ring, int32_t fewest_chunks,
                                    int32_t shared_bytes) {
  while (ring.stage_vectors > fewest_chunks &&
         ring.num_warps * CopyPipelineBytes(ring) > shared_bytes) {
    ring.stage_vectors = Max(CeilDivide(ring.stage_vectors, 2), fewest_chunks);
  }
  return ring;
}

// For rows of so many chunks: whole rows if they are short, else parts of them, and then as many
// warps, and stages, as fit.
constexpr CopyPipeline PlanCopyPipeline(int64_t row_vectors, int32_t num_places, int32_t most_warps,
                                        int32_t shared_bytes) {
  constexpr int32_t kMostStageChunks = 512;  // 8 KB
  constexpr int32_t kFewestStages = 3;
  CopyPipeline ring = {0, 1, kFewestStages, 1, num_places};
  const int64_t parts = CeilDivide(row_vectors, kMostStageChunks);
  if (parts > 0) ring.stage_vectors = static_cast<int32_t>(CeilDivide(row_vectors, parts));
  ring = ShrinkStages(ring, 1, shared_bytes);
  while (ring.num_warps < most_warps &&
         (ring.num_warps + 1) * CopyPipelineBytes(ring) <= shared_bytes) {
    ++ring.num_warps;
  }
  while (ring.num_stages < kMaxCopyStages) {
    CopyPipeline longer = ring;
    ++longer.num_stages;
    if (longer.num_warps * CopyPipelineBytes(longer) > shared_bytes) break;
    ring = longer;
  }
  return ring;
}

// For so many warps, if they fit, that have one row on its way at a time: cut in four, or smaller.
constexpr CopyPipeline PlanSendPipeline(int64_t row_vectors, int32_t num_places, int32_t num_warps,
                                        int32_t shared_bytes) {
  constexpr int32_t kFewestStageChunks = 192;  // 3 KB
  constexpr int64_t kMostStageChunks = 1024;
  const auto quarter = static_cast<int32_t>(Min(CeilDivide(row_vectors, 4), kMostStageChunks));
  CopyPipeline ring = {0, num_warps, 3, quarter, num_places};
  if (ring.stage_vectors < kFewestStageChunks) {
    ring.stage_vectors = static_cast<int32_t>(Min(row_vectors, kFewestStageChunks));
  }
  ring = ShrinkStages(ring, kFewestStageChunks, shared_bytes);
  while (ring.num_warps > 1 && ring.num_warps * CopyPipelineBytes(ring) > shared_bytes) {
    --ring.num_warps;
  }
  return ShrinkStages(ring, 1, shared_bytes);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_COPY_PIPELINE_H_
