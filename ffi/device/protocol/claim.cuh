// The claim of a control block by the call that runs. The calls of a control block follow each
// other in stream order. One that runs beside another, in a branch of a graph or on another stream,
// finds the claim, and fails on all of its blocks before it has touched anything.
//
// The claim counts the calls of the generation, and has the tag of the one that runs. All tags have
// equally many bits set, so the union of two is no tag. A block sets the bits of its own tag and
// looks at what was there: nothing or its own tag, and the claim is its kernel's. One block finds
// another single tag, and writes down whose it was. Then the claim keeps the bits of both, and
// every later block finds who has it: nobody, once that call has ended. The claim does not become
// free again before jax_ep.release(), and its generation is aborted.
#ifndef JAX_EP_DEVICE_PROTOCOL_CLAIM_CUH_
#define JAX_EP_DEVICE_PROTOCOL_CLAIM_CUH_

#include "ffi/device/profile/recorder.cuh"
#include "ffi/device/protocol/abort.cuh"

namespace jax_ep {

// Called by one thread, after the call `sequence` has set its tag in a claim that had the bits
// `tags`. Returns whether the claim is nevertheless this kernel's.
__device__ __noinline__ inline bool OwnsContestedClaim(const CallParams& call, uint32_t tags,
                                                       uint64_t sequence) {
  ControlBlock* const control = call.control;
  if (__popc(tags) == kClaimTagWeight) {
    StoreReleaseDevice(&control->contested_owner, tags);  // CLAIM_CONTEST
    return false;
  }
  while (LoadAcquireDevice(&control->last_ended) < sequence) {
    const uint32_t tag = LoadAcquireDevice(&control->contested_owner);
    if (tag != 0) return tag == call.claim_tag;
    __nanosleep(20);  // another thread is storing it
  }
  return false;
}

// The claim of a block, by its first thread. Between the constructor and Await the block may do
// what another call bears: load, and draw tickets of low-latency calls, which nobody else draws. A
// low-latency call that loses tickets so waits for what nobody sends, until the other aborts it.
//
// If it meets the host's claim, it may have loaded what belongs to the old generation (MetHost).
// Tickets are valid in any case: the start of a generation resets their counter. Those drawn before
// are drawn again, and an item that is sent twice is the same. Those drawn after are drawn once.
class ClaimRequest {
 public:
  // Called by all threads of every block, before anything else.
  __device__ ClaimRequest(const CallParams& call, const RoleContext& role)
      : call_(call), role_(role) {
    Request();
    if (role.Thread() == 0) role.scratch->met_host = false;
  }

  // Called by all threads. Returns the call's sequence number. 0: another call runs; this one must
  // neither wait nor store to anything but its results, which all blocks make safe together.
  __device__ uint64_t Await() {
    const ProfileSpan span(SpanKind::kWaitClaim);
    if (role_.Thread() == 0) role_.scratch->sequence = Sequence();
    role_.Sync();
    const uint64_t sequence = role_.scratch->sequence;
    if (sequence == 0 && role_.Warp() == 0) {
      AbortGroup(call_, Outcome::kConcurrent, WaitPoint::kEntry, call_.control->rank,
                 FirstSequence(call_.control->generation) + (call_.control->claim >> kClaimShift));
    }
    return sequence;
  }

  // Called after Await. Returns whether a generation was starting, which has started since.
  __device__ bool MetHost() const { return role_.scratch->met_host; }

 private:
  // The load moves the state of the generation into L1. So neither this load nor an acquire, which
  // would empty L1, takes time after the claim. A generation that starts keeps its claim for longer
  // than it takes from here to there.
  __device__ void Request() {
    first_sequence_ = FirstSequence(call_.control->generation);
    const bool is_first = role_.Thread() == 0;
    before_ = OrRelaxedDevice(&call_.control->claim, call_.claim_tag, is_first);  // CLAIM_CALL
  }

  __device__ uint64_t Sequence() {
    while (before_ & kClaimOfHost) {
      role_.scratch->met_host = true;
      // The new generation clears the tag. Acquire: its state.
      while (LoadAcquireDevice(&call_.control->claim) & kClaimOfHost) __nanosleep(100);
      Request();
    }
    const uint64_t sequence = first_sequence_ + (before_ >> kClaimShift);
    const auto tags = static_cast<uint32_t>(before_ & kClaimTags);
    const bool is_own =
        tags == 0 || tags == call_.claim_tag || OwnsContestedClaim(call_, tags, sequence);
    return is_own ? sequence : 0;
  }

  const CallParams& call_;
  const RoleContext& role_;
  uint64_t first_sequence_;
  uint64_t before_;  // in the first thread
};

// Called by all threads of every block, before anything else: ClaimRequest::Await.
__device__ inline uint64_t BeginCall(const CallParams& call, const RoleContext& role) {
  return ClaimRequest(call, role).Await();
}

// Called by one thread of the last block. Counts the call, and frees the claim unless it is
// contested.
__device__ inline void EndClaim(const CallParams& call, uint64_t sequence) {
  const uint64_t completed = CompletedCalls(sequence);
  const uint64_t claim = completed << kClaimShift | call.claim_tag;
  // CLAIM_END. The kernel waits for neither result. Its end orders both before the next call.
  MaxRelaxedDevice(&call.control->last_ended, sequence);
  CompareAndSwapRelaxedDevice(&call.control->claim, claim, (completed + 1) << kClaimShift);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_CLAIM_CUH_
