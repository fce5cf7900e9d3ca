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
#include "ffi/runtime/settings.h"

namespace jax_ep {

using PreparedTransfer =
    std::variant<PreparedDispatch, PreparedRedispatch, PreparedCombine, PreparedBulkCopyCeiling>;

// Holds what the stages need of one operation.
struct TransferStages : Contract<TransferConfig, TransferShape> {
  Status (*prepare)(const TransferCall& call, PreparedTransfer* prepared);
  // Whether the call only starts the transfer, on its lane's stream; transfer_done joins it.
  bool is_start = false;
};

template <typename Prepared, Status (*prepare)(const TransferCall&, Prepared*)>
Status PrepareAs(const TransferCall& call, PreparedTransfer* prepared) {
  return prepare(call, &prepared->emplace<Prepared>());
}

constexpr TransferStages StartOf(TransferStages stages, const char* target) {
  stages.target = target;
  stages.is_start = true;
  return stages;
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

template <const TransferStages& kStages>
auto InstantiateAs(ffi::RemainingArgs operands, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  return InstantiateTransfer(kStages, attributes, operands, results);
}

// Reads the attributes that all transfers have, and those of transfers by a plan.
void DecodeTransfer(AttributeReader& reader, TransferConfig* config);
void DecodePlanned(AttributeReader& reader, TransferConfig* config);

// Completes an operation's stages by the shared prepare and initialize.
Handlers TransferHandlers(const char* target, XLA_FFI_Handler* instantiate,
                          XLA_FFI_Handler* execute);

// Finds what execute needs on a device; an error if the device has not initialized the call.
Status FindPrepared(const TransferState& state, int32_t device, const PreparedTransfer** prepared,
                    ControlBlock** control);

// Returns the stream that the call's kernels are launched in: XLA's, or, for a start, that of the
// lane, which then waits for XLA's.
Status FindLaunchStream(const TransferState& state, int32_t device, cudaStream_t stream,
                        cudaStream_t* launch_stream);

// Called after the launch: remembers the buffers of a start, for transfer_done.
Status AddInFlight(const TransferState& state, int32_t device, cudaStream_t launch_stream,
                   const ffi::RemainingArgs& operands, const ffi::RemainingRets& results);

// Returns the status of execute. After an error the other devices do not wait for this one.
ffi::Error Launched(const TransferState& state, int32_t device, const Status& status);

// The execute stage. `kBind` finds the addresses of an operation's buffers.
template <typename Prepared, auto kBind>
ffi::Error ExecuteTransfer(TransferState* state, cudaStream_t stream, int32_t device,
                           ffi::RemainingArgs operands, ffi::RemainingRets results) {
  if (IsAbsent(device)) return ffi::Error::Success();
  const PreparedTransfer* prepared = nullptr;
  ControlBlock* control = nullptr;
  Status status = FindPrepared(*state, device, &prepared, &control);
  if (status.ok()) status = FindLaunchStream(*state, device, stream, &stream);
  if (status.ok()) {
    status = Launch(std::get<Prepared>(*prepared), control, kBind(state->config, operands, results),
                    stream);
  }
  if (status.ok()) status = AddInFlight(*state, device, stream, operands, results);
  return Launched(*state, device, status);
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
