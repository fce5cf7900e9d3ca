// The names of what profiles record, for people.
#ifndef JAX_EP_RUNTIME_PROFILE_NAMES_H_
#define JAX_EP_RUNTIME_PROFILE_NAMES_H_

#include <cstddef>

#include "ffi/device/profile/events.h"

namespace jax_ep {

// Indexed by ProfiledKernel: the names that other profilers show.
inline constexpr const char* kProfiledKernelNames[] = {
    "DispatchKernel",
    "RedispatchKernel",
    "CombineKernel",
    "LowLatencyDispatchKernel",
    "LowLatencyRedispatchKernel",
    "LowLatencyCombineKernel",
    "HierarchicalDispatchKernel",
    "HierarchicalRedispatchKernel",
    "HierarchicalCombineKernel",
    "HierarchicalLowLatencyDispatchKernel",
    "HierarchicalLowLatencyRedispatchKernel",
    "HierarchicalLowLatencyCombineKernel",
    "BulkCopyCeilingKernel",
    "GroupedMatmulSwappedKernel",
    "GroupedMatmulRhsGradientKernel",
    "GroupedMatmulFp8Kernel",
    "GroupedMatmulFp8RhsGradientKernel",
    "GroupedMatmulMxFp4Kernel",
    "GroupedMatmulMxFp4DecodeKernel",
    "GroupedMatmulMxFp4LhsGradientKernel",
};
static_assert(sizeof kProfiledKernelNames / sizeof *kProfiledKernelNames ==
              static_cast<size_t>(ProfiledKernel::kNumKernels));

struct SpanName {
  const char* name;                 // begins with "wait" where the warp does nothing else
  const char* waits_for = nullptr;  // the short waits that the span adds up
};

// Indexed by SpanKind.
inline constexpr SpanName kSpanNames[] = {
    {""},
    {""},
    {""},
    {""},
    {"count assignments"},
    {"send routes and weights"},
    {"compute the plan"},
    {"invert the plan"},
    {"send tokens"},
    {"pack a message"},
    {"forward tokens"},
    {"expand tokens"},
    {"fill empty rows"},
    {"send sums"},
    {"reduce sums"},
    {"load operands", "wait for an empty stage"},
    {"multiply", "wait for a full stage"},
    {"store results"},
    {"wait for the claim"},
    {"wait for entry"},
    {"wait for the prologue"},
    {"wait for an item"},
    {"wait for an item's stores"},
    {"wait for a chunk"},
    {"wait for a credit"},
    {"wait for segments"},
    {"wait for the expand warps"},
    {"wait for the block's warps"},
    {"wait for a tile"},
};
static_assert(sizeof kSpanNames / sizeof *kSpanNames == static_cast<size_t>(SpanKind::kNumKinds));

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_PROFILE_NAMES_H_
