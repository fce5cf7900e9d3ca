// Signals between the ranks of a domain: that they have entered a call, that a chunk is in a
// slot of a ring, and that the slot is free again. Rings begin anew in every call, as a rank sends
// into them only when all ranks of its domain have entered the call.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_DOMAIN_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_DOMAIN_CUH_

#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/transfer/hierarchical/layout.h"
#include "ffi/device/transfer/hierarchical/rail_network.cuh"

namespace jax_ep {

// Waits for items of work look at the deadline, and at who has left, at one poll of so many: that
// takes longer than a poll.
inline constexpr uint32_t kPollsPerCheck = 8;

// The ranks of this domain, as receivers (dispatch/receivers.cuh).
struct DomainRanks {
  const Domains* domains;

  __device__ int count(const CallParams& /*call*/) const { return domains->size; }
  __device__ int After(const CallParams& /*call*/, int rank, int distance) const {
    const int index = domains->Index(rank) + distance;
    return rank - domains->Index(rank) + (index < domains->size ? index : index - domains->size);
  }
};

// Calls use(to) for all ranks of the domain of `rank`, which comes last.
template <typename Use>
__device__ inline void ForEachDomainRank(const CallParams& call, const Domains& domains, int rank,
                                         Use use) {
#pragma unroll 1
  for (int i = 1; i <= domains.size; ++i) use(DomainRanks{&domains}.After(call, rank, i));
}

// Called by one warp. Calls use(rank) for every other rank of the domain, in different lanes.
template <typename Use>
__device__ inline void ForEachNeighbor(const CallParams& call, const Domains& domains, Use use) {
  const DomainRanks ranks = {&domains};
  const int rank = call.control->rank;
#pragma unroll 1
  for (int i = 1 + LaneIndex(); i < domains.size; i += 32) use(ranks.After(call, rank, i));
}

// Called by one warp. Returns whether `holds(rail)` for all rails, which different lanes find out.
template <typename Holds>
__device__ inline bool AllRails(const HierarchicalLayout& layout, Holds holds) {
  bool all_hold = true;
#pragma unroll 1
  for (int rail = LaneIndex(); rail < layout.domains.num_rails(); rail += 32) {
    all_hold &= holds(rail);
  }
  return !__any_sync(kFullWarp, !all_hold);
}

// Called by one warp. Signals the domain that this rank has entered the call.
__device__ inline void SignalDomainEntry(const CallParams& call, const Domains& domains,
                                         uint64_t sequence, bool poisoned) {
  InjectDelay(call, sequence, 2);
  ForEachNeighbor(call, domains, [&](int peer) {
    StoreEntry(call.control, peer, sequence, call.fingerprint, poisoned);
  });
}

// Called by a role that holds `ticket`, if HasWorkspace. The first warp of the holder of ticket 0
// signals entry to the domain.
__device__ inline void SignalDomainEntry(const CallParams& call, const Domains& domains,
                                         uint64_t sequence, int ticket, bool poisoned,
                                         const RoleContext& role) {
  if (ticket != 0 || role.Warp() != 0 || !MayStoreToPeers(call)) return;
  SignalDomainEntry(call, domains, sequence, poisoned);
}

// Called by one whole warp; all lanes return the same. Waits until all ranks of the domain have
// entered the call, and checks that it is the same call on all of them. kPoisoned: a plan in the
// domain is, and the call goes on all the same.
__device__ inline Outcome WaitForDomainEntry(const CallParams& call, const Domains& domains,
                                             uint64_t sequence) {
  const ControlBlock* const control = call.control;
  if (!HasWorkspace(call)) {
    AbortGroup(call, Outcome::kNoWorkspace, WaitPoint::kEntry, control->rank, sequence);
    if (LaneIndex() == 0) RecordFailure(call, Outcome::kNoWorkspace);
    __syncwarp();
    return Outcome::kNoWorkspace;
  }
  const EntryFlags* const entry = control->inbox->entry[sequence % 2];
  Deadline deadline(call, WaitPoint::kEntry, sequence);
  auto outcome = Outcome::kArrived;
  while (true) {
    uint32_t missing = kMaxRanks, mismatched = kMaxRanks;
    bool poisoned = false;
    ForEachNeighbor(call, domains, [&](int peer) {
      if (LoadAcquireSystem(&entry[peer].sequence) < sequence) {  // WAIT_ENTRY
        missing = min(missing, static_cast<uint32_t>(peer));
        return;
      }
      const Outcome read = ReadEntryFlags(call, entry[peer]);
      if (read == Outcome::kMismatch) mismatched = min(mismatched, static_cast<uint32_t>(peer));
      poisoned |= read == Outcome::kPoisoned;
    });
    missing = __reduce_min_sync(kFullWarp, missing);
    mismatched = __reduce_min_sync(kFullWarp, mismatched);
    // The abort word overrides the flags, so it is loaded after them.
    outcome = FindAbort(call);
    if (outcome != Outcome::kArrived) break;
    if (mismatched != kMaxRanks) {
      AbortGroup(call, Outcome::kMismatch, WaitPoint::kEntry, mismatched, sequence);
      outcome = Outcome::kMismatch;
    } else if (missing != kMaxRanks) {
      outcome = deadline.Check(missing);
      if (outcome == Outcome::kArrived) {
        __nanosleep(40);
        continue;
      }
    } else if (__any_sync(kFullWarp, poisoned)) {
      outcome = Outcome::kPoisoned;
    }
    break;
  }
  if (outcome != Outcome::kArrived && LaneIndex() == 0) RecordFailure(call, outcome);
  __syncwarp();  // orders what each lane has acquired before what any lane does next
  return outcome;
}

// WaitForDomainEntry for a role. Each block waits for itself.
__device__ inline Outcome WaitForDomainEntry(const CallParams& call, const Domains& domains,
                                             uint64_t sequence, const RoleContext& role) {
  return WaitByFirstWarp(call, sequence, role,
                         [&] { return WaitForDomainEntry(call, domains, sequence); });
}

// Called by one whole warp; all lanes return the same. Aborts if a rank has left the generation
// instead of entering the call (start_generation.cu). It has told all ranks by entry flags, which
// otherwise only those of its domain wait for, or its partners over a network.
__device__ inline Outcome FindLeaver(const CallParams& call, uint64_t sequence) {
  const ControlBlock* const control = call.control;
  const EntryFlags* const entry = control->inbox->entry[sequence % 2];
  uint32_t leaver = kMaxRanks;
  ForEachPeer(control, [&](int peer) {
    if (LoadAcquireSystem(&entry[peer].sequence) < sequence) return;
    if (ReadEntryFlags(call, entry[peer]) == Outcome::kMismatch) {
      leaver = min(leaver, static_cast<uint32_t>(peer));
    }
  });
  const int domain_size = control->num_peers + 1;
  const int num_partners = HasNetwork(control) ? call.num_ranks / domain_size : 0;
#pragma unroll 1
  for (int domain = LaneIndex(); domain < num_partners; domain += 32) {
    const uint64_t left = LoadAcquireSystem(&control->inbox->rail_leaves[domain]);
    if (left == 0 || left > sequence) continue;
    const uint32_t partner = domain * domain_size + control->rank % domain_size;
    leaver = min(leaver, partner);
  }
  leaver = __reduce_min_sync(kFullWarp, leaver);
  if (leaver == kMaxRanks) return Outcome::kArrived;
  AbortGroup(call, Outcome::kMismatch, WaitPoint::kEntry, static_cast<int>(leaver), sequence);
  return Outcome::kMismatch;
}

// The slot of a chunk in the rings inside a domain.
struct DomainSlot {
  int slot;
  int lap;
  uint64_t number;

  __device__ DomainSlot(const HierarchicalLayout& layout, uint64_t sequence, int chunk)
      : slot(chunk & (layout.domain_slots - 1)),
        lap(chunk / layout.domain_slots),
        number(ChunkNumber(sequence, lap)) {}
};

// Returns whether a chunk of a ring has arrived here. Acquire. WAIT_CHUNK
__device__ inline bool HasChunk(const CallParams& call, int ring, const DomainSlot& slot) {
  return LoadAcquireSystem(&call.control->inbox->domain_chunks[ring][slot.slot]) >= slot.number;
}

// Returns whether the receiver has returned the slot's credit to this rank. Acquire. WAIT_CREDIT
__device__ inline bool HasCredit(const CallParams& call, int ring, const DomainSlot& slot) {
  if (slot.lap == 0) return true;
  return LoadAcquireSystem(&call.control->inbox->domain_credits[ring][slot.slot]) >=
         slot.number - 1;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_DOMAIN_CUH_
