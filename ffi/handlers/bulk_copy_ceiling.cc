#include "ffi/handlers/operations.h"
#include "ffi/handlers/transfer.h"
#include "ffi/runtime/settings.h"

namespace jax_ep {
namespace {

// Sends rows to all other ranks by bulk copies, as fast as the links carry them. Benchmarks alone
// use it.
auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateCall<TransferState>(kBulkCopyCeilingTarget, CheckBulkCopyCeiling, attributes,
                                        operands, results);
}

ffi::Error Execute(TransferState* state, cudaStream_t stream, int32_t device,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  if (IsAbsent(device)) return ffi::Error::Success();
  TransferSizes sizes;
  BulkCopyCeilingCall call = {.transfer = {}, .repeats = state->config.repeats};
  Status status = CheckCallBuffers(CheckBulkCopyCeiling, state->config, operands, results, &sizes);
  if (status.ok()) status = MakeTransferCall(*state, sizes, device, &call.transfer);
  if (!status.ok()) return Launched(*state, device, status);
  call.x = Addresses(operands).Next();
  call.status = Addresses(results).Next<int32_t>();
  return Launched(*state, device, LaunchBulkCopyCeiling(call, stream));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<TransferState>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Target BulkCopyCeilingHandlers() {
  return TransferTarget(kBulkCopyCeilingTarget, kInstantiate, kExecute);
}

}  // namespace jax_ep
