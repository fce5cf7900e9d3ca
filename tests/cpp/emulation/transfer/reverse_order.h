// Takes the place of ffi/device/transfer/dispatch/send_order.cuh: each rank sends its tokens in
// another order than theirs. So a kernel that takes a token for its position, or the reverse, is
// wrong.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_SEND_ORDER_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_SEND_ORDER_CUH_

#include "tests/cpp/emulation/cuda/emulator.h"
// After the emulator, which comes before all others.
#include "ffi/device/protocol/call_params.h"

namespace jax_ep {

class TokenOrder {
 public:
  explicit TokenOrder(const CallParams& call) : num_tokens_(call.num_tokens) {}

  // Even ranks send from the last token to the first. Odd ones begin in the middle.
  int Token(int rank, int position) const {
    if (rank % 2 == 0) return num_tokens_ - 1 - position;
    return (position + num_tokens_ / 2) % num_tokens_;
  }

 private:
  const int num_tokens_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_SEND_ORDER_CUH_
