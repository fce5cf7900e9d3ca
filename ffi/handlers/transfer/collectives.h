// XLA's extension that lends a call the communicator of its group.
#ifndef JAX_EP_HANDLERS_TRANSFER_COLLECTIVES_H_
#define JAX_EP_HANDLERS_TRANSFER_COLLECTIVES_H_

#include <cstdint>

#include "xla/ffi/api/collectives_api.h"
#include "xla/ffi/api/ffi.h"

namespace jax_ep {

struct Communicator
    : ::xla::ffi::internal::CommunicatorContextBase<::xla::ffi::internal::ErrorPolicy> {
  using CommunicatorContextBase::CommunicatorContextBase;
};

struct Collectives : ::xla::ffi::internal::CollectivesExtensionBase<Communicator> {
  // Later minor versions only add to 0.1, which is all that is used here. Without this, a runtime
  // of any other minor version would be refused.
  static bool Support(int32_t major, int32_t minor) { return major == 0 && minor >= 1; }
};

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_TRANSFER_COLLECTIVES_H_
