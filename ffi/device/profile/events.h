// The records of a profile (jax_ep.profile), for kernels and host.
//
// A warp that records has a track: a record of where it runs, one each of its begin and end, and
// one per span of time. Chunks of records are reserved for a warp, and each record names its track.
#ifndef JAX_EP_DEVICE_PROFILE_EVENTS_H_
#define JAX_EP_DEVICE_PROFILE_EVENTS_H_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Shared memory of a warp that records.
#ifdef JAX_EP_PROFILE
inline constexpr int kRecorderBytes = 16;
#else
inline constexpr int kRecorderBytes = 0;
#endif

// Named in ffi/runtime/profile/names.h, as the kinds of spans.
enum class ProfiledKernel : uint8_t {
  kDispatch,
  kRedispatch,
  kCombine,
  kLowLatencyDispatch,
  kLowLatencyRedispatch,
  kLowLatencyCombine,
  kHierarchicalDispatch,
  kHierarchicalRedispatch,
  kHierarchicalCombine,
  kHierarchicalLowLatencyDispatch,
  kHierarchicalLowLatencyRedispatch,
  kHierarchicalLowLatencyCombine,
  kBulkCopyCeiling,
  kGroupedMatmulSwapped,
  kGroupedMatmulRhsGradient,
  kGroupedMatmulFp8,
  kGroupedMatmulFp8RhsGradient,
  kGroupedMatmulMxFp4,
  kGroupedMatmulMxFp4Decode,
  kGroupedMatmulMxFp4LhsGradient,
  kNumKernels
};

enum class SpanKind : uint8_t {
  kNone,  // nothing is written there
  // Once per track:
  kPlace,  // kernel | warp << 8 | SM << 16, block | blocks << 16, grid id
  kBegin,  // clock, low and high word of the global timer
  kEnd,    // likewise
  // Clock at the start and at the end, and the clock cycles of short waits in between:
  kCountAssignments,
  kSendRoutes,
  kPlan,
  kInvertPlan,
  kSend,
  kPackMessage,
  kForward,
  kExpand,
  kFill,
  kSendSums,
  kReduce,
  kLoad,
  kMultiply,
  kEpilogue,
  kWaitClaim,
  kWaitEntry,
  kWaitItems,
  kWaitItem,
  kWaitItemStores,
  kWaitChunk,
  kWaitCredit,
  kWaitSegment,
  kWaitRole,
  kWaitBlock,
  kWaitTile,
  kNumKinds
};

struct alignas(16) ProfileRecord {
  uint32_t tag;  // SpanKind << kTrackBits | index of the track's first record
  uint32_t words[3];
};

inline constexpr int kTrackBits = 24;
inline constexpr int64_t kMaxProfileRecords = int64_t{1} << kTrackBits;
inline constexpr uint32_t kChunkRecords = 16;  // reserved at once

// The device's buffer: the records follow. Zeroed before kernels write.
struct alignas(64) ProfileBuffer {
  uint32_t capacity;   // records, a multiple of kChunkRecords
  uint32_t all_warps;  // else the first warp of each role
  uint32_t num_reserved;
  uint32_t num_lost;  // spans for which there was no room
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROFILE_EVENTS_H_
