// The rails of a rank whose kernels put into the partners' memory by themselves, by NVSHMEM. Their
// memory is symmetric: the address of a partner's memory is that of the same offset in this rank's
// heap, and goes with the number of the partner's process (PE).
#ifndef JAX_EP_DEVICE_PROTOCOL_SYMMETRIC_RAILS_H_
#define JAX_EP_DEVICE_PROTOCOL_SYMMETRIC_RAILS_H_

#include "ffi/device/common/integers.h"
#include "ffi/device/protocol/rail_requests.h"

namespace jax_ep {

struct Inbox;

// In device memory, the same for all calls of a generation.
struct SymmetricRails {
  struct Partner {
    Inbox* inbox;          // symmetric addresses
    unsigned char* rings;  // likewise; null without a workspace
    int32_t pe;
  };
  unsigned char* rings;  // this rank's: it receives in the first half, and packs in the second one
  int32_t num_rails;
  int32_t domain;                 // this rank's
  Partner partners[kMaxDomains];  // indexed by rail
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_SYMMETRIC_RAILS_H_
