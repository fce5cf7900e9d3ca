// The symmetric device memory of one group: which buffers a rank has, where, how large.
// It follows from static shapes alone, so every process computes the same layout.
#ifndef JAX_EP_RUNTIME_WORKSPACE_H_
#define JAX_EP_RUNTIME_WORKSPACE_H_

#include <array>
#include <cstdint>

#include "ffi/device/protocol/call.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

struct WorkspaceShape {
  int64_t num_tokens = 0;     // T, of one rank
  int64_t hidden = 0;         // H
  int64_t top_k = 0;          // K
  int64_t num_experts = 0;    // E, of all ranks
  int64_t num_ranks = 0;      // R
  int64_t element_bytes = 0;  // of one row element on the wire
};

struct WorkspaceBuffer {
  const char* name;
  int64_t offset;  // from the workspace's base; a multiple of kWorkspaceAlignment
  int64_t bytes;   // a multiple of kWorkspaceAlignment
};

struct WorkspaceLayout {
  std::array<WorkspaceBuffer, kNumBuffers> buffers;  // by Buffer
  int64_t bytes = 0;
};

inline constexpr int64_t kWorkspaceAlignment = 256;

// Larger than any machine; a size beyond it is a mistake rather than a request.
inline constexpr int64_t kMaxWorkspaceBytes = int64_t{1} << 44;

// Bytes from one wire row to the next. Bulk copies move multiples of 16 bytes.
inline constexpr int64_t kWireRowAlignment = 16;

// Fills `layout`, allocating nothing, or says which size does not make sense.
Status PlanWorkspace(const WorkspaceShape& shape, WorkspaceLayout* layout);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_WORKSPACE_H_
