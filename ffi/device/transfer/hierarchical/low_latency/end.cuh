// The end of a low-latency call over several domains.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_END_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_END_CUH_

#include "ffi/device/transfer/hierarchical/end.cuh"
#include "ffi/device/transfer/hierarchical/low_latency/waits.cuh"

namespace jax_ep {

// Called by one warp. Waits until all ranks of the domain have entered the call, and all messages
// of all rails have arrived: double-buffering and credits rely on it. kPoisoned: a plan of any rank
// is poisoned, in a combine.
__device__ inline Outcome WaitForAll(const CallParams& call, const HierarchicalLayout& layout,
                                     uint64_t sequence) {
  Outcome outcome = WaitForDomainEntry(call, layout.domains, sequence);  // EAGER_WAIT_ENTRY
  bool poisoned = outcome == Outcome::kPoisoned;
  if (outcome != Outcome::kArrived && !poisoned) return outcome;
  const int rails = layout.domains.num_rails();
  const int num_messages = rails * layout.num_messages();
  outcome = WaitForSegments(call, layout, sequence, [&] {  // EAGER_WAIT_ALL
    uint32_t missing = kMaxRanks;
#pragma unroll 1
    for (int i = LaneIndex(); i < num_messages; i += 32) {
      const Rail rail(call, layout, i % rails);
      if (!rail.HasArrived(i / rails)) missing = min(missing, uint32_t(rail.partner()));
    }
    return missing;
  });
  if (outcome != Outcome::kArrived) return outcome;
#pragma unroll 1
  for (int i = 0; i < rails; ++i) {
    const Rail rail(call, layout, i);
    outcome = CheckPartner(call, rail, 0, sequence);
    if (outcome != Outcome::kArrived) break;
    poisoned |= LoadRelaxedSystem(&rail.Header(0).poisoned) != 0;
  }
  if (outcome == Outcome::kArrived && poisoned) outcome = Outcome::kPoisoned;
  if (outcome != Outcome::kArrived && LaneIndex() == 0) RecordFailure(call, outcome);
  __syncwarp();
  return outcome;
}

// Called by all threads of all blocks; `outcome` is that of this thread's warp. Ends the call.
// After a failure the last block makes the results safe by make_safe(failure).
template <typename MakeSafe>
__device__ inline void FinishLowLatencyCall(const CallParams& call,
                                            const HierarchicalLayout& layout,
                                            const RoleContext& role, uint64_t sequence,
                                            Outcome outcome, MakeSafe make_safe) {
  // The last warp of the last block has the least other work.
  if (role.block == role.num_blocks - 1 && role.Warp() == role.NumWarps() - 1) {
    const Outcome all = WaitForAll(call, layout, sequence);
    if (all != Outcome::kArrived) outcome = all;
  }
  const BlockEnd end = FinishBlock(call, role, outcome);
  if (!end.is_last) return;
  const Outcome failure = KernelOutcome(call, role, end);
  if (failure != Outcome::kArrived) {
    make_safe(failure);
    role.Sync();
  }
  ControlBlock* const control = call.control;
  if (failure == Outcome::kArrived || failure == Outcome::kPoisoned) {
    // All messages were read. EAGER_SIGNAL_CREDIT
    const int rails = layout.domains.num_rails();
    for (int i = role.Thread(); i < rails * layout.num_messages(); i += role.num_threads) {
      Rail(call, layout, i % rails).ReturnCredit(i / rails);
    }
  } else if (role.Thread() == 0) {
    TellAbort(control, failure);  // EAGER_SIGNAL_ABORT
  }
  role.Sync();
  if (role.Thread() == 0) control->rail_messages += layout.num_messages();
  FinishCall(call, role, sequence);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_END_CUH_
