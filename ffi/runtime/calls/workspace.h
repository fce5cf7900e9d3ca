// The layout of a rank's workspace, the symmetric device memory of a group. It follows from static
// shapes alone, so every process computes the same layout.
#ifndef JAX_EP_RUNTIME_CALLS_WORKSPACE_H_
#define JAX_EP_RUNTIME_CALLS_WORKSPACE_H_

#include <array>
#include <cstdint>

#include "ffi/device/protocol/call_params.h"
#include "ffi/device/transfer/hierarchical/low_latency/layout.h"
#include "ffi/runtime/calls/transfer_shape.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

struct WorkspaceBuffer {
  const char* name;
  int64_t offset;  // from the workspace's base; a multiple of kWorkspaceAlignment
  int64_t bytes;   // a multiple of kWorkspaceAlignment
};

struct WorkspaceLayout {
  std::array<WorkspaceBuffer, kNumBuffers> buffers;  // indexed by WorkspaceBufferId
  // The rings of all rails, and the eager buffers of the domains, with several NVLink domains.
  // Their place and size are those of the group, and not of the shape.
  WorkspaceBuffer rails = {"rails", 0, 0};
  int64_t bytes = 0;
};

inline constexpr int64_t kWorkspaceAlignment = 256;

// Returns the offset of the rails' rings in every workspace that has them.
int64_t RailsOffset();

// Larger than any machine's memory: a larger size is a mistake.
inline constexpr int64_t kMaxWorkspaceBytes = int64_t{1} << 44;

// Computes the layout, or returns an error that names a size that makes no sense. Allocates
// nothing.
Status PlanWorkspace(const TransferShape& shape, WorkspaceLayout* layout);

// The sizes of a call over several domains; call it after PlanWorkspace. The bounds are for tests.
Status PlanHierarchicalLayout(const TransferShape& shape, int64_t rail_slots, int64_t ring_chunks,
                              int64_t chunk_tokens, HierarchicalLayout* layout);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_CALLS_WORKSPACE_H_
