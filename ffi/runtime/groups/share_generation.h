// A generation of a group that spans processes: each allocates the memory of its ranks, and maps
// that of the others.
#ifndef JAX_EP_RUNTIME_GROUPS_SHARE_GENERATION_H_
#define JAX_EP_RUNTIME_GROUPS_SHARE_GENERATION_H_

#include <cstdint>

#include "ffi/runtime/groups/generation.h"
#include "ffi/runtime/status.h"
#include "ffi/runtime/transport/local/peer_group.h"

namespace jax_ep {

// Why a generation cannot be shared, if not by a failure of the group: in any of the processes.
struct SharingFailure {
  bool out_of_memory = false;
  bool memory = false;  // it cannot be allocated, sent or mapped; another kind may work
};

// Completes a generation, which this process has tried to allocate with the result `allocated`. All
// processes return the same status, and the same `failure`, which is an input, too. Sets `number`
// to the generation's, the largest that a process has asked for.
Status ShareGeneration(PeerGroup& peers, const Status& allocated, int64_t workspace_bytes,
                       Generation* generation, uint64_t* number, SharingFailure* failure);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_GROUPS_SHARE_GENERATION_H_
