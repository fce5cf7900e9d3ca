// The end of a call over several domains.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_END_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_END_CUH_

#include "ffi/device/protocol/kernel_end.cuh"
#include "ffi/device/transfer/fill.cuh"
#include "ffi/device/transfer/hierarchical/layout.h"
#include "ffi/device/transfer/hierarchical/rail_network.cuh"

namespace jax_ep {

// Called by one thread. Partners over a network learn of an abort here: each rank of a domain tells
// its own.
__device__ inline void TellAbort(ControlBlock* control, Outcome failure) {
  if (!HasNetwork(control)) return;
  TellPartners(control, RailWord::kAbort, uint64_t{static_cast<uint32_t>(failure)});
}

// Called by the last block, as FinishCall, which it calls.
__device__ inline void FinishHierarchicalCall(const CallParams& call,
                                              const HierarchicalLayout& layout,
                                              const RoleContext& role, uint64_t sequence,
                                              int num_messages, Outcome failure) {
  ControlBlock* const control = call.control;
  const bool is_aborted = failure != Outcome::kArrived && failure != Outcome::kPoisoned;
  if (is_aborted && role.Thread() == 0) TellAbort(control, failure);
  HierarchicalProgress& progress = control->hierarchical;
  const ThreadGroup threads = role.BlockThreads();
  const int streams = NumStreams(layout.domains, call.num_ranks);
  const int words = streams * ClaimWords::words_per_stream(num_messages);
  for (ClaimWords* claims : {&progress.send_claims, &progress.receive_claims}) {
    Fill(threads, claims->first_words, streams, 0u);
    Fill(threads, claims->bits, words, uint64_t{0});
  }
  Fill(threads, progress.own_sums, int64_t{kMaxHierarchicalChunks / 64}, uint64_t{0});
  Fill(threads, progress.metadata_spread, int64_t{kMaxRanks}, 0u);
  // After a failure slots may have been read once.
  Fill(threads, progress.slot_reads, int64_t{kMaxRailSlots}, 0u);
  if (role.Thread() == 0) {
    progress.metadata_tickets = 0;
    control->rail_messages += num_messages;
  }
  FinishCall(call, role, sequence);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_END_CUH_
