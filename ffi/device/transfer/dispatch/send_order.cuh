// The order in which a rank sends its tokens in a dispatch: a policy of TokenSender and
// TokenExpansion. Ring slots, token chunks and credits are addressed by the position in that order,
// and not by the token, so another order changes nothing else. All ranks have to agree on it.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_SEND_ORDER_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_SEND_ORDER_CUH_

#include "ffi/device/protocol/call_params.h"

namespace jax_ep {

// Token by token. It needs no knowledge of the routes.
class TokenOrder {
 public:
  __device__ explicit TokenOrder(const CallParams& /*call*/) {}

  // Returns the token that `rank` sends at `position`.
  __device__ int Token(int /*rank*/, int position) const { return position; }
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_SEND_ORDER_CUH_
