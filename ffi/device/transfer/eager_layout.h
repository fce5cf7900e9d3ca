// Eager buffers: memory that peers may store to before this rank has entered the call, as in the
// eager protocol of MPI. All of a low-latency call goes there, and the counts of every dispatch.
//
// They are double-buffered by the sequence number, modulo 2. In every call all ranks wait until
// all have entered it. So during call n all ranks have entered call n - 1, and have ended call n -
// 2, which used the same buffer.
#ifndef JAX_EP_DEVICE_TRANSFER_EAGER_LAYOUT_H_
#define JAX_EP_DEVICE_TRANSFER_EAGER_LAYOUT_H_

#include "ffi/device/common/integers.h"
#include "ffi/device/common/limits.h"

namespace jax_ep {

// Sizes of one of the two buffers, for calls of all shapes.
inline constexpr int64_t kEagerRowBytes = int64_t{8} << 20;
inline constexpr int64_t kMaxLowLatencyAssignments = 8192;  // R * T * K
inline constexpr int64_t kMaxLowLatencySegments = 8192;     // R * T * segments per row

// Inline-flag packets: 16 bytes that are stored and loaded at once, data and tag together. The tag
// is that of EagerBuffers.

// An assignment of a token.
struct AssignmentPacket {
  int32_t expert;
  float weight;
  uint64_t tag;
};
static_assert(sizeof(AssignmentPacket) == 16, "a packet is stored by one instruction");

// The assignments of one rank to two experts.
struct CountPacket {
  int32_t counts[2];
  uint64_t tag;
};
static_assert(sizeof(CountPacket) == 16, "a packet is stored by one instruction");

// Returns the number of pairs of bins; the bins are the experts and one for bad ids.
JAX_EP_HOST_DEVICE constexpr int32_t CountPairs(int32_t num_experts) {
  return (num_experts + 2) / 2;
}
static_assert(int64_t{kMaxRanks} * CountPairs(kMaxExperts) * int64_t{sizeof(CountPacket)} <=
                  kEagerRowBytes,
              "the counts of all ranks fit into kEagerRows");

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_EAGER_LAYOUT_H_
