#include "ffi/handlers/operations.h"
#include "ffi/handlers/transfer.h"

namespace jax_ep {
namespace {

// Expert outputs go back to the tokens' ranks; their weighted sums come out.
auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateCall(kCombineTarget, CheckCombine, attributes, operands, results);
}

ffi::Error Execute(TransferState* state, cudaStream_t /*stream*/, int32_t /*device*/,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  TransferSizes sizes;
  Status status = CheckCallBuffers(CheckCombine, state->config, operands, results, &sizes);
  if (status.ok()) status = NoKernels(state->target);
  return ToError(status);
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<TransferConfig>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Target CombineHandlers() { return TransferTarget(kCombineTarget, kInstantiate, kExecute); }

}  // namespace jax_ep
