#include "ffi/handlers/operations.h"
#include "ffi/handlers/transfer.h"
#include "ffi/runtime/settings.h"

namespace jax_ep {
namespace {

// Rows to all other ranks, as fast as the links take them. Of benchmarks alone.
auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateCall<TransferState>(kCeilingTarget, CheckCeiling, attributes, operands,
                                        results);
}

ffi::Error Execute(TransferState* state, cudaStream_t stream, int32_t device,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  if (IsAbsent(device)) return ffi::Error::Success();
  TransferSizes sizes;
  CeilingCall call = {.transfer = {}, .repeats = state->config.repeats};
  Status status = CheckCallBuffers(CheckCeiling, state->config, operands, results, &sizes);
  if (status.ok()) status = MakeTransferCall(*state, sizes, device, &call.transfer);
  if (!status.ok()) return ToError(status);
  call.x = Addresses(operands).Next();
  call.status = Addresses(results).Next<int32_t>();
  return ToError(LaunchCeiling(call, stream));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<TransferState>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Target CeilingHandlers() { return TransferTarget(kCeilingTarget, kInstantiate, kExecute); }

}  // namespace jax_ep
