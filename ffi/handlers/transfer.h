// The stages that dispatch, dispatch_by_plan and combine share.
#ifndef JAX_EP_HANDLERS_TRANSFER_H_
#define JAX_EP_HANDLERS_TRANSFER_H_

#include <cstdint>

#include "ffi/handlers/call.h"
#include "ffi/kernels/transfer/launch.h"

namespace jax_ep {

// Adds the shared prepare and initialize to an operation's own stages.
Target TransferTarget(const char* name, XLA_FFI_Handler* instantiate, XLA_FFI_Handler* execute);

// What a launch on this device is given, whatever the operation.
Status MakeTransferCall(TransferState& state, const TransferSizes& sizes, int32_t device,
                        TransferCall* call);

// The plan among the operands of dispatch_by_plan and combine, and among the results of dispatch.
PlanOperands NextPlanOperands(Addresses& operands);
PlanResults NextPlanResults(Addresses& results);

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_TRANSFER_H_
