// Arrival counters tell a concurrent kernel which rows of a dispatch are complete. A counter holds
// the sequence number of the latest call and that call's count, so nobody zeroes it between calls.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_ARRIVALS_H_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_ARRIVALS_H_

#include "ffi/device/common/integers.h"
#include "ffi/device/protocol/control_block.h"

namespace jax_ep {

// Rows per counter. A matmul tile reads one or two such ranges.
inline constexpr int kArrivalRows = 128;

inline constexpr int kArrivalCountBits = 8;
static_assert(kArrivalRows < 1 << kArrivalCountBits, "a count does not reach the sequence number");
static_assert(kGenerationBits + kGenerationShift + kArrivalCountBits <= 64,
              "a sequence number and a count fit into a counter");

// Returns the value that a counter has reached once the call has counted `count` rows. Later calls
// have higher values.
JAX_EP_HOST_DEVICE constexpr uint64_t ArrivalValue(uint64_t sequence, int count) {
  return sequence << kArrivalCountBits | static_cast<uint32_t>(count);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_ARRIVALS_H_
