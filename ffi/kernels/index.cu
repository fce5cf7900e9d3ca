// The first kernel of combine: finds, for every choice of every rank, its row here.
#include "ffi/device/rows.cuh"
#include "ffi/kernels/stages.h"

namespace jax_ep {

__global__ void __launch_bounds__(kThreads) IndexKernel(const __grid_constant__ IndexStage stage) {
  // The index is in the workspace, where an earlier call of another shape may have had what peers
  // read; so this needs the gate although no peer reads the index.
  const Outcome outcome = PassGate(stage.call, Gate::kFree, CurrentEpoch(stage.call));
  if (outcome == Outcome::kArrived) IndexRows(stage.call, stage.plan);
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* IndexKernelAddress() { return reinterpret_cast<const void*>(IndexKernel); }

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
