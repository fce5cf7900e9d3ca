// The rows of tokens in a dispatch, which the routes that all ranks send determine.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_RECEIVED_ROUTES_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_RECEIVED_ROUTES_CUH_

#include "ffi/device/transfer/dispatch/row_placement.cuh"

namespace jax_ep {

// Finds a token's rows by the routes that its rank has sent.
class ReceivedRoutes {
 public:
  struct Loaded {
    Route routes[2];  // top-k indices l and l + 32
  };

  __device__ ReceivedRoutes(const CallParams& call, const RowPlacement& placement)
      : call_(call), placement_(placement), routes_(call.LocalBuffer<const int2>(kRoutes)) {}

  __device__ Loaded Load(int source, int token) const {
    Loaded loaded;
    for (int i = 0; i < 2; ++i) {
      const int k = LaneIndex() + 32 * i;
      loaded.routes[i] = {-1, 0};
      if (k >= call_.top_k) continue;
      const int2 route =
          LoadGlobalNoAllocate(&routes_[(source * call_.num_tokens + token) * call_.top_k + k]);
      loaded.routes[i] = {route.x, route.y};
    }
    return loaded;
  }

  __device__ TokenRows Rows(int source, int token, const Loaded& loaded) const {
    const RowPlacement::PlacedToken<2> placed = placement_.Place(source, loaded.routes);
    placement_.Write(source, token, placed);
    return placed.found;
  }

 private:
  const CallParams& call_;
  const RowPlacement& placement_;
  const int2* const routes_;  // [R][T * K]
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_RECEIVED_ROUTES_CUH_
