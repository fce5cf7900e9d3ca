// The ranks that get what a rank tells all of them in a dispatch: routes, weights and counts.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_RECEIVERS_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_RECEIVERS_CUH_

#include "ffi/device/protocol/call_params.h"

namespace jax_ep {

// All ranks of the group.
struct AllRanks {
  __device__ int count(const CallParams& call) const { return call.num_ranks; }

  // Returns the receiver `distance` after a rank; at the distance count() it is the rank itself.
  __device__ int After(const CallParams& call, int rank, int distance) const {
    return call.RankAfter(rank, distance);
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_RECEIVERS_CUH_
