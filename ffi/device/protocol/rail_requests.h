// Requests of a device to a thread of its host, which reaches rail partners over a network
// (runtime/network). They are words in host memory, of one rank and one generation.
#ifndef JAX_EP_DEVICE_PROTOCOL_RAIL_REQUESTS_H_
#define JAX_EP_DEVICE_PROTOCOL_RAIL_REQUESTS_H_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// NVLink domains of a call, and the slots of the rings of a rank's rails
// (transfer/hierarchical/layout.h).
inline constexpr int kMaxDomains = 64;  // a warp adds the sums of all domains, two per lane
inline constexpr int kMaxRailSlots = 512;

// The device writes a word again only when its last value was consumed: it packs a slot again when
// the partner has returned the credit for what the host has put, and returns a credit again when
// another message has arrived. So a word for each slot is enough, and no ring can be full.
struct RailRequests {
  alignas(128) uint64_t messages[kMaxRailSlots];  // RequestOfMessage, by slot of the send rings
  alignas(128) uint64_t credits[kMaxRailSlots];   // a message's number, by slot of receive rings
  alignas(128) uint64_t abort;                    // an Outcome to tell all partners, or 0
  uint64_t leave;  // to tell them likewise: the first call that this rank does not make, or 0
};

// A message that is packed: its number, and its size up to kRailSlotBytes.
inline constexpr int kMessageBytesBits = 19;
JAX_EP_HOST_DEVICE constexpr uint64_t RequestOfMessage(uint64_t number, uint64_t bytes) {
  return number << kMessageBytesBits | bytes;
}
JAX_EP_HOST_DEVICE constexpr uint64_t MessageNumber(uint64_t request) {
  return request >> kMessageBytesBits;
}
JAX_EP_HOST_DEVICE constexpr uint64_t MessageBytes(uint64_t request) {
  return request & ((uint64_t{1} << kMessageBytesBits) - 1);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_RAIL_REQUESTS_H_
