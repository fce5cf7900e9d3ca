// Starts a generation on one device: copies what is the same for all of its calls into the control
// block. The stream's order puts the kernel between two calls.
#include "ffi/device/protocol/running_call.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

// Signals entry of the next call of the old generation, with a fingerprint that no call has. A peer
// that makes that call finds a mismatch.
__device__ void LeaveGeneration(const ControlBlock* control) {
  constexpr uint64_t kNoCall = 0;
  const uint64_t sequence = control->sequence + 1;
  ForEachPeer(control, [&](int peer) {
    EntryFlags* const flags = &control->peers[peer].inbox->entry[sequence % 2][control->rank];
    StoreRelaxedSystem(&flags->fingerprint, kNoCall);
    StoreReleaseSystem(&flags->sequence, sequence);
  });
}

}  // namespace

__global__ void __launch_bounds__(kStartGenerationThreads)
    StartGenerationKernel(const __grid_constant__ StartGenerationParams params) {
  ControlBlock* const control = params.control;
  if (threadIdx.x < 32) LeaveGeneration(control);
  __syncthreads();  // the old state has been read
  constexpr int kWords = sizeof(GenerationState) / sizeof(uint64_t);
  static_assert(kWords * sizeof(uint64_t) == sizeof(GenerationState), "it is copied by words");
  uint64_t* const to = reinterpret_cast<uint64_t*>(static_cast<GenerationState*>(control));
  const uint64_t* const from = reinterpret_cast<const uint64_t*>(params.next);
  for (int i = threadIdx.x; i < kWords; i += blockDim.x) to[i] = from[i];
  if (threadIdx.x == 0) control->sequence = params.next->generation << kGenerationShift;
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

const void* StartGenerationKernelAddress() {
  return reinterpret_cast<const void*>(StartGenerationKernel);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
