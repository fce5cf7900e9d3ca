// The stages that all transfers share: dispatch, redispatch, combine, bulk_copy_ceiling.
#ifndef JAX_EP_HANDLERS_TRANSFER_H_
#define JAX_EP_HANDLERS_TRANSFER_H_

#include <cstdint>

#include "ffi/handlers/call.h"
#include "ffi/kernels/transfer/launch.h"

namespace jax_ep {

// Completes an operation's stages by the shared prepare and initialize.
Target TransferTarget(const char* name, XLA_FFI_Handler* instantiate, XLA_FFI_Handler* execute);

// Fills the part of a launch's arguments that all transfers share.
Status MakeTransferCall(TransferState& state, const TransferSizes& sizes, int32_t device,
                        TransferCall* call);

// Returns the status of execute. After an error the other devices do not wait for this one.
ffi::Error Launched(const TransferState& state, int32_t device, const Status& status);

// The next addresses, as the plan among the operands of redispatch and combine, and among the
// results of dispatch.
PlanOperands NextPlanOperands(Addresses& operands);
PlanResults NextPlanResults(Addresses& results);

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_TRANSFER_H_
