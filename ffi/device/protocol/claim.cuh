// The claim of a control block by the call that runs. The calls of a control block follow each
// other in stream order. One that runs beside another, in a branch of a graph or on another stream,
// finds the claim, and fails on all of its blocks before it has touched anything.
//
// The claim counts the calls of the generation, and has the tag of the one that runs. All tags have
// equally many bits set, so the union of two is no tag. A block sets the bits of its own tag and
// looks at what was there: nothing or its own tag, and the claim is its kernel's. The first block
// that finds another single tag writes down whose it was. Then the claim keeps the bits of both,
// and every later block finds who has it. The claim does not become free again in this generation,
// which is aborted.
#ifndef JAX_EP_DEVICE_PROTOCOL_CLAIM_CUH_
#define JAX_EP_DEVICE_PROTOCOL_CLAIM_CUH_

#include "ffi/device/protocol/abort.cuh"

namespace jax_ep {

// Called by one thread, after a call has set its tag in a claim that had the bits `tags`. Returns
// whether the claim is nevertheless this kernel's.
__device__ __noinline__ inline bool OwnsContestedClaim(const CallParams& call, uint32_t tags) {
  uint32_t* const owner = &call.control->contested_owner;
  if (__popc(tags) == kClaimTagWeight) {
    StoreReleaseDevice(owner, tags);
    return false;
  }
  uint32_t tag;
  while ((tag = LoadAcquireDevice(owner)) == 0) __nanosleep(20);  // another thread is storing it
  return tag == call.claim_tag;
}

// Called by one thread. Returns the call's sequence number, or 0 if another call has the claim.
__device__ inline uint64_t Claim(const CallParams& call) {
  ControlBlock* const control = call.control;
  while (true) {
    // Acquire: the state of a generation that has just begun.
    const uint64_t before = OrAcquireDevice(&control->claim, call.claim_tag);
    const auto tags = static_cast<uint32_t>(before & kClaimTags);
    if (before & kClaimOfHost) {
      // A generation starts. It clears the tag.
      while (LoadAcquireDevice(&control->claim) & kClaimOfHost) __nanosleep(100);
      continue;
    }
    const bool is_own = tags == 0 || tags == call.claim_tag || OwnsContestedClaim(call, tags);
    return is_own ? FirstSequence(control->generation) + (before >> kClaimShift) : 0;
  }
}

// Called by all threads of every block, before anything else. Returns the call's sequence number.
// 0: another call runs; this one must neither wait nor store to anything but its results, which are
// made safe by all blocks together.
__device__ inline uint64_t BeginCall(const CallParams& call) {
  __shared__ uint64_t sequence;
  if (threadIdx.x == 0) sequence = Claim(call);
  __syncthreads();
  if (sequence == 0 && threadIdx.x < 32) {
    AbortGroup(call, Outcome::kConcurrent, WaitPoint::kEntry, call.control->rank,
               FirstSequence(call.control->generation) + (call.control->claim >> kClaimShift));
  }
  return sequence;
}

// Called by one thread of the last block. Counts the call, and frees the claim unless it is
// contested.
__device__ inline void EndClaim(const CallParams& call, uint64_t sequence) {
  const uint64_t completed = sequence - FirstSequence(call.control->generation);
  // The end of the kernel orders this before the next call.
  CompareAndSwapRelaxedDevice(&call.control->claim, completed << kClaimShift | call.claim_tag,
                              (completed + 1) << kClaimShift);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_CLAIM_CUH_
