// Where threads and devices are, for the watchdog.
#ifndef JAX_EP_TESTS_CPP_EMULATION_RUNTIME_RANDOM_POSITION_H_
#define JAX_EP_TESTS_CPP_EMULATION_RUNTIME_RANDOM_POSITION_H_

#include <atomic>
#include <bit>
#include <cstdint>
#include <cstdio>

#include "ffi/device/protocol/control_block.h"

namespace jax_ep::testing {

// The place of the thread of one device and lane.
struct Position {
  std::atomic<int> call = 0;
  std::atomic<const char*> stage = "is before";
  Position() = default;
  Position(const Position&) {}
};

// Counts the items that a running call over several domains has claimed. Other calls claim none.
inline int64_t ClaimedItems(ControlBlock& control) {
  HierarchicalProgress& hierarchical = control.hierarchical;
  int64_t items = 0;
  for (ClaimWords* claims : {&hierarchical.send_claims, &hierarchical.receive_claims}) {
    for (uint64_t& bits : claims->bits) items += std::popcount(std::atomic_ref(bits).load());
  }
  return items;
}

// Prints what the kernel that has claimed a control block waits for.
inline void DescribeDevice(ControlBlock& control) {
  const uint64_t claim = control.claim;
  const uint64_t sequence = FirstSequence(control.generation) + (claim >> kClaimShift);
  std::printf("; generation %lu, %lu calls completed, tag %lx, abort %u", control.generation,
              claim >> kClaimShift, claim & (kClaimTags | kClaimOfHost), control.inbox->abort);
  if ((claim & kClaimTags) == 0) return;
  std::printf(", %ld items of domains claimed", ClaimedItems(control));
  for (int peer = 0; peer < control.num_ranks; ++peer) {
    if (peer == control.rank) continue;
    if (control.inbox->entry[sequence % 2][peer].sequence >= sequence) continue;
    std::printf(", waits for rank %d", peer);
  }
}

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_RUNTIME_RANDOM_POSITION_H_
