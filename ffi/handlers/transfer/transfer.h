// The stages that all transfers share: dispatch, redispatch, combine, bulk_copy_ceiling.
#ifndef JAX_EP_HANDLERS_TRANSFER_TRANSFER_H_
#define JAX_EP_HANDLERS_TRANSFER_TRANSFER_H_

#include <cstdint>
#include <memory>
#include <variant>

#include "ffi/handlers/call.h"
#include "ffi/handlers/operations.h"
#include "ffi/kernels/transfer/launch.h"
#include "ffi/runtime/groups/call_site.h"
#include "ffi/runtime/per_device.h"

namespace jax_ep {

using PreparedTransfer =
    std::variant<PreparedDispatch, PreparedRedispatch, PreparedCombine, PreparedBulkCopyCeiling>;

// Holds what the stages before execute need of one operation.
struct TransferStages : Contract<TransferConfig, TransferShape> {
  Status (*prepare)(const TransferCall& call, PreparedTransfer* prepared);
};

template <typename Prepared, Status (*prepare)(const TransferCall&, Prepared*)>
Status PrepareAs(const TransferCall& call, PreparedTransfer* prepared) {
  return prepare(call, &prepared->emplace<Prepared>());
}

// The state of a call site: instantiate makes it, the later stages read it. All local devices share
// it.
struct TransferState {
  static ffi::TypeId id;  // filled when JAX registers the type

  TransferState(const TransferStages& stages, TransferConfig config);

  const TransferStages& stages;
  const TransferConfig config;
  CallSite site;
  PerDevice<PreparedTransfer> prepared;  // made by the first initialize
};

ffi::ErrorOr<std::unique_ptr<TransferState>> InstantiateTransfer(const TransferStages& stages,
                                                                 const ffi::Dictionary& attributes,
                                                                 const ffi::RemainingArgs& operands,
                                                                 const ffi::RemainingRets& results);

// Reads the attributes that all transfers have, and those of transfers by a plan.
void DecodeTransfer(AttributeReader& reader, TransferConfig* config);
void DecodePlanned(AttributeReader& reader, TransferConfig* config);

// Completes an operation's stages by the shared prepare and initialize.
Handlers TransferHandlers(const char* target, XLA_FFI_Handler* instantiate,
                          XLA_FFI_Handler* execute);

// Finds what execute needs on a device; an error if the device has not initialized the call.
Status FindPrepared(const TransferState& state, int32_t device, const PreparedTransfer** prepared,
                    ControlBlock** control);

// Returns the status of execute. After an error the other devices do not wait for this one.
ffi::Error Launched(const TransferState& state, int32_t device, const Status& status);

// The execute stage, once the buffers' addresses are known.
template <typename Prepared, typename Buffers>
ffi::Error ExecuteTransfer(const TransferState& state, int32_t device, const Buffers& buffers,
                           cudaStream_t stream) {
  const PreparedTransfer* prepared = nullptr;
  ControlBlock* control = nullptr;
  Status status = FindPrepared(state, device, &prepared, &control);
  if (status.ok()) status = Launch(std::get<Prepared>(*prepared), control, buffers, stream);
  return Launched(state, device, status);
}

// The next addresses, as the plan among the operands of redispatch and combine, and among the
// results of dispatch.
PlanOperands NextPlanOperands(Addresses<ffi::RemainingArgs>& operands);
PlanResults NextPlanResults(Addresses<ffi::RemainingRets>& results);

// Likewise what follows in a plan of two levels; null in one of one level.
ForwardingOperands NextForwardingOperands(const TransferConfig& config,
                                          Addresses<ffi::RemainingArgs>& operands);
ForwardingResults NextForwardingResults(const TransferConfig& config,
                                        Addresses<ffi::RemainingRets>& results);

}  // namespace jax_ep

#endif  // JAX_EP_HANDLERS_TRANSFER_TRANSFER_H_
