// How the shared memory of a block is cut into rings of stages for rows on their way.
#ifndef JAX_EP_DEVICE_COPY_RING_H_
#define JAX_EP_DEVICE_COPY_RING_H_

#include "ffi/device/integers.h"

namespace jax_ep {

inline constexpr int kMaxCopyStages = 8;

// Of each of some warps of a block.
struct CopyRing {
  int32_t first_byte;  // of shared memory: before it is something else
  int32_t num_warps;
  int32_t num_stages;    // 3 or more; 0: there are none, rows go through registers
  int32_t stage_chunks;  // of 16 bytes
  int32_t num_places;    // that a row goes to, at most
};

// What is in each stage. Of one warp, after its stages; the places of each stage's row follow.
struct alignas(16) CopyRingState {
  uint64_t loaded[kMaxCopyStages];  // barriers
  int32_t first[kMaxCopyStages];    // chunk of the row
  int32_t count[kMaxCopyStages];
  int32_t num_places[kMaxCopyStages];
};

// Bytes of shared memory of a warp.
JAX_EP_HOST_DEVICE constexpr int32_t CopyRingBytes(const CopyRing& ring) {
  if (ring.num_stages == 0) return 0;
  const int32_t bytes = ring.num_stages * (ring.stage_chunks * 16 + ring.num_places * 8) +
                        static_cast<int32_t>(sizeof(CopyRingState));
  return (bytes + 127) / 128 * 128;
}

// For rows of so many chunks: whole rows if they are short, else parts of them, and then as many
// warps, and stages, as fit.
constexpr CopyRing PlanCopyRing(int64_t row_chunks, int32_t num_places, int32_t most_warps,
                                int32_t shared_bytes) {
  constexpr int32_t kMostStageChunks = 512;  // 8 KB
  constexpr int32_t kFewestStages = 3;
  CopyRing ring = {0, 1, kFewestStages, 1, num_places};
  const int64_t parts = (row_chunks + kMostStageChunks - 1) / kMostStageChunks;
  if (parts > 0) ring.stage_chunks = static_cast<int32_t>((row_chunks + parts - 1) / parts);
  while (ring.stage_chunks > 1 && CopyRingBytes(ring) > shared_bytes) {
    ring.stage_chunks = (ring.stage_chunks + 1) / 2;
  }
  while (ring.num_warps < most_warps &&
         (ring.num_warps + 1) * CopyRingBytes(ring) <= shared_bytes) {
    ++ring.num_warps;
  }
  while (ring.num_stages < kMaxCopyStages) {
    CopyRing longer = ring;
    ++longer.num_stages;
    if (longer.num_warps * CopyRingBytes(longer) > shared_bytes) break;
    ring = longer;
  }
  return ring;
}

// For so many warps, if they fit, that have one row on its way at a time: cut in four, or smaller.
constexpr CopyRing PlanSendRing(int64_t row_chunks, int32_t num_places, int32_t num_warps,
                                int32_t shared_bytes) {
  constexpr int32_t kFewestStageChunks = 192;  // 3 KB
  constexpr int64_t kMostStageChunks = 1024;
  const int64_t quarters = (row_chunks + 3) / 4;
  const auto quarter =
      static_cast<int32_t>(quarters < kMostStageChunks ? quarters : kMostStageChunks);
  CopyRing ring = {0, num_warps, 3, quarter, num_places};
  const auto fits = [&] { return ring.num_warps * CopyRingBytes(ring) <= shared_bytes; };
  if (ring.stage_chunks < kFewestStageChunks) {
    ring.stage_chunks =
        static_cast<int32_t>(row_chunks < kFewestStageChunks ? row_chunks : kFewestStageChunks);
  }
  while (!fits() && ring.stage_chunks > kFewestStageChunks) {
    const int32_t half = (ring.stage_chunks + 1) / 2;
    ring.stage_chunks = half < kFewestStageChunks ? kFewestStageChunks : half;
  }
  while (!fits() && ring.num_warps > 1) --ring.num_warps;
  while (!fits() && ring.stage_chunks > 1) ring.stage_chunks = (ring.stage_chunks + 1) / 2;
  return ring;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_COPY_RING_H_
