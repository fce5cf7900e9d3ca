// Starts a generation on one device: copies what is the same for all of its calls into the control
// block, between two calls.
#include "ffi/device/protocol/peer_stores.cuh"
#include "ffi/device/transfer/hierarchical/rail_network.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

// Called by one thread. Waits until no call has the claim. Returns whether it is contested.
__device__ bool ClaimForHost(ControlBlock* control) {
  uint64_t* const claim = &control->claim;
  while (true) {
    const uint64_t before = LoadAcquireDevice(claim);
    const bool is_free = (before & kClaimTags) == 0;
    const bool is_contested = __popcll(before & kClaimTags) > kClaimTagWeight;
    const uint64_t sequence = FirstSequence(control->generation) + (before >> kClaimShift);
    const bool runs =
        !is_free && !(is_contested && LoadAcquireDevice(&control->last_ended) >= sequence);
    // CLAIM_HOST
    if (!runs && CompareAndSwapDevice(claim, before, before | kClaimOfHost) == before) {
      return is_contested;
    }
    __nanosleep(100);
  }
}

// Signals entry of the next call of the old generation, with a fingerprint that no call has. A peer
// that makes that call finds a mismatch.
__device__ void LeaveGeneration(const ControlBlock* control) {
  constexpr uint64_t kNoCall = 0;
  const uint64_t sequence = FirstSequence(control->generation) + (control->claim >> kClaimShift);
  // GENERATION_LEAVE
  ForEachPeer(control, [&](int peer) { StoreEntry(control, peer, sequence, kNoCall, false); });
  if (HasNetwork(control) && LaneIndex() == 0) {
    TellPartners(control, RailWord::kLeave, sequence);
  }
}

}  // namespace

__global__ void __launch_bounds__(kStartGenerationThreads)
    StartGenerationKernel(const __grid_constant__ StartGenerationParams params) {
  ControlBlock* const control = params.control;
  bool is_contested = false;  // in the first thread
  if (threadIdx.x == 0) is_contested = ClaimForHost(control);
  __syncthreads();
  if (threadIdx.x < 32) LeaveGeneration(control);
  __syncthreads();  // the old state has been read
  constexpr int kWords = sizeof(GenerationState) / sizeof(uint64_t);
  static_assert(kWords * sizeof(uint64_t) == sizeof(GenerationState), "it is copied by words");
  uint64_t* const to = reinterpret_cast<uint64_t*>(static_cast<GenerationState*>(control));
  const uint64_t* const from = reinterpret_cast<const uint64_t*>(params.next);
  for (int i = threadIdx.x; i < kWords; i += blockDim.x) to[i] = from[i];
  // After a contested call the work counters may have been left.
  uint32_t* const counters = reinterpret_cast<uint32_t*>(&control->progress);
  for (int i = threadIdx.x; i < int{sizeof(Progress) / 4}; i += blockDim.x) counters[i] = 0;
  uint32_t* const others = reinterpret_cast<uint32_t*>(&control->hierarchical);
  constexpr int kOthers = sizeof(HierarchicalProgress) / 4;
  for (int i = threadIdx.x; i < kOthers; i += blockDim.x) others[i] = 0;
  if (threadIdx.x == 0) {
    control->blocks_finished = 0;
    control->rail_messages = 0;
  }
  __threadfence();
  __syncthreads();
  // See ClaimRequest: a call that has loaded the old state finds this claim. PTX lets a sleep end
  // early.
  constexpr unsigned kNanoseconds = 10'000;
  const uint64_t start = GlobalTimer();
  do {
    __nanosleep(kNanoseconds);
  } while (GlobalTimer() - start < kNanoseconds);
  // Release: a call that waits for the end of the host's claim sees the new state.
  if (threadIdx.x == 0) {
    // Blocks of the call that contested the claim may still come. Before a generation without
    // workspaces, which is release's, the host has waited for the device.
    const bool stays = is_contested && control->workspace_bytes != 0;
    control->contested_owner = 0;
    if (stays) control->last_ended = FirstSequence(control->generation);
    StoreReleaseDevice(&control->claim, stays ? kClaimTags : 0);
  }
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

const void* StartGenerationKernelAddress() {
  return reinterpret_cast<const void*>(StartGenerationKernel);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
