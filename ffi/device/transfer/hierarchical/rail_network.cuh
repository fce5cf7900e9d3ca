// How kernels use the network to their rail partners: by requests to a thread of the host
// (rail_requests.h). Compiled with JAX_EP_NVSHMEM they put by themselves instead, in memory that is
// symmetric (symmetric_rails.h).
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_RAIL_NETWORK_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_RAIL_NETWORK_CUH_

#include "ffi/device/protocol/control_block.h"
#include "ffi/device/ptx/memory.cuh"
#include "ffi/device/transfer/hierarchical/layout.h"

namespace jax_ep {

// A slot of a rail's ring: among all that this rank receives in, and among the partner's. Slots
// that this rank packs in are numbered as those that it receives in.
struct RailSlot {
  int rail;
  int here;
  int there;
};

// The words that a rank tells all of its partners at once.
enum class RailWord { kAbort, kLeave };

#ifndef JAX_EP_NVSHMEM

// Returns whether a network reaches the partners; otherwise this rank does, by stores.
__device__ inline bool HasNetwork(const ControlBlock* control) {
  return control->rail_requests != nullptr;
}

// Returns where this rank's rings are, by an offset in its workspace.
__device__ inline uint8_t* RailMemory(const ControlBlock* control,
                                      const HierarchicalLayout& /*layout*/, int64_t offset) {
  return control->workspace + offset;
}

// Called by one thread. Releases what it has stored and acquired, and puts a packed message of so
// many bytes, whose flag then has the number.
__device__ inline void PutMessage(const ControlBlock* control, const RailSlot& slot,
                                  const uint8_t* /*packed*/, uint64_t bytes, uint64_t number) {
  StoreReleaseSystem(&control->rail_requests->messages[slot.here], RequestOfMessage(number, bytes));
}

// Called by one thread, after everything in the message was read.
__device__ inline void PutCredit(const ControlBlock* control, const RailSlot& slot,
                                 uint64_t number) {
  StoreReleaseSystem(&control->rail_requests->credits[slot.here], number);
}

// Called by one thread.
__device__ inline void TellPartners(const ControlBlock* control, RailWord word, uint64_t value) {
  RailRequests* const requests = control->rail_requests;
  StoreReleaseSystem(word == RailWord::kAbort ? &requests->abort : &requests->leave, value);
}

#else

// NVSHMEM's functions, or what tests have instead of them. Addresses of the PE's memory are those
// of the same offset in this rank's heap. The flag is set, once the bytes are there.
__device__ void NvshmemPut(void* to, const void* from, uint64_t bytes, uint64_t* flag,
                           uint64_t value, int pe);
__device__ void NvshmemSet(uint64_t* flag, uint64_t value, int pe);

__device__ inline bool HasNetwork(const ControlBlock* control) {
  return control->symmetric_rails != nullptr;
}

__device__ inline uint8_t* RailMemory(const ControlBlock* control, const HierarchicalLayout& layout,
                                      int64_t offset) {
  const SymmetricRails* const rails = control->symmetric_rails;
  if (rails == nullptr) return control->workspace + offset;
  return rails->rings + (offset - layout.rails_offset);
}

// NVSHMEM orders what this thread has done before. The fence extends that to what other threads
// have packed, which this one has acquired: the network's reader is another agent of the system. It
// also keeps NVSHMEM's copy by NVLink, whose loads need not be coherent, from stale lines of L1.
__device__ inline void PutMessage(const ControlBlock* control, const RailSlot& slot,
                                  const uint8_t* packed, uint64_t bytes, uint64_t number) {
  const SymmetricRails::Partner& partner = control->symmetric_rails->partners[slot.rail];
  __threadfence_system();
  NvshmemPut(partner.rings + slot.there * kRailSlotBytes, packed, bytes,
             &partner.inbox->rail_messages[slot.there], number, partner.pe);
}

// The fence: the reads of other threads, which this one has acquired, come before the credit.
__device__ inline void PutCredit(const ControlBlock* control, const RailSlot& slot,
                                 uint64_t number) {
  const SymmetricRails::Partner& partner = control->symmetric_rails->partners[slot.rail];
  __threadfence_system();
  NvshmemSet(&partner.inbox->rail_credits[slot.there], number, partner.pe);
}

// The words publish no other data.
__device__ inline void TellPartners(const ControlBlock* control, RailWord word, uint64_t value) {
  const SymmetricRails* const rails = control->symmetric_rails;
#pragma unroll 1
  for (int rail = 0; rail < rails->num_rails; ++rail) {
    const SymmetricRails::Partner& partner = rails->partners[rail];
    uint64_t* const flag = word == RailWord::kAbort
                               ? reinterpret_cast<uint64_t*>(&partner.inbox->abort)
                               : &partner.inbox->rail_leaves[rails->domain];
    NvshmemSet(flag, value, partner.pe);
  }
}

#endif  // JAX_EP_NVSHMEM

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_RAIL_NETWORK_CUH_
