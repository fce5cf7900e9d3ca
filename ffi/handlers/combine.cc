#include "ffi/handlers/operations.h"
#include "ffi/handlers/transfer.h"
#include "ffi/runtime/settings.h"

namespace jax_ep {
namespace {

// Returns expert outputs to the tokens' ranks, and sums them with their weights.
auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateCall<TransferState>(kCombineTarget, CheckCombine, attributes, operands,
                                        results);
}

ffi::Error Execute(TransferState* state, cudaStream_t stream, int32_t device,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  if (IsAbsent(device)) return ffi::Error::Success();
  const TransferConfig& config = state->config;
  TransferSizes sizes;
  CombineCall call = {
      .transfer = {}, .has_weights = config.has_weights, .has_scalars = config.has_scalars};
  Status status = CheckCallBuffers(CheckCombine, config, operands, results, &sizes);
  if (status.ok()) status = MakeTransferCall(*state, sizes, device, &call.transfer);
  if (!status.ok()) return Launched(*state, device, status);
  Addresses in(operands);
  call.y = in.Next();
  call.plan = NextPlanOperands(in);
  if (config.has_weights) call.row_weights = in.Next<const float>();
  if (config.has_scalars) call.row_scalars = in.Next<const float>();
  Addresses out(results);
  call.out = out.Next();
  if (config.has_scalars) call.assignment_scalars = out.Next<float>();
  return Launched(*state, device, LaunchCombine(call, stream));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<TransferState>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Target CombineHandlers() { return TransferTarget(kCombineTarget, kInstantiate, kExecute); }

}  // namespace jax_ep
