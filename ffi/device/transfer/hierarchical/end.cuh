// The end of a call over several domains.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_END_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_END_CUH_

#include "ffi/device/protocol/kernel_end.cuh"
#include "ffi/device/transfer/hierarchical/layout.h"

namespace jax_ep {

// Called by the last block, as FinishCall, which it calls.
__device__ inline void FinishHierarchicalCall(const CallParams& call,
                                              const HierarchicalLayout& layout,
                                              const RoleContext& role, uint64_t sequence,
                                              int num_messages) {
  ControlBlock* const control = call.control;
  // After a failure slots may have been read once.
  uint32_t* const words = reinterpret_cast<uint32_t*>(&control->hierarchical);
#pragma unroll 1
  for (int i = role.Thread(); i < int{sizeof(HierarchicalProgress) / 4}; i += role.num_threads) {
    words[i] = 0;
  }
  if (role.Thread() == 0) control->rail_messages += num_messages;
  FinishCall(call, role, sequence);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_END_CUH_
