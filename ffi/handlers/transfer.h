// The stages that dispatch, dispatch_by_plan and combine share.
#ifndef JAX_EP_HANDLERS_TRANSFER_H_
#define JAX_EP_HANDLERS_TRANSFER_H_

#include "ffi/handlers/call.h"

namespace jax_ep {

// Adds the shared prepare and initialize to an operation's own stages.
Target TransferTarget(const char* name, XLA_FFI_Handler* instantiate, XLA_FFI_Handler* execute);

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_TRANSFER_H_
