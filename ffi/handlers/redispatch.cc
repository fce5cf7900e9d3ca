#include "ffi/handlers/operations.h"
#include "ffi/handlers/transfer.h"
#include "ffi/runtime/settings.h"

namespace jax_ep {
namespace {

// Sends x and topk_weights along a plan, without an exchange of ids and counts.
auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateCall<TransferState>(kRedispatchTarget, CheckRedispatch, attributes, operands,
                                        results);
}

ffi::Error Execute(TransferState* state, cudaStream_t stream, int32_t device,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  if (IsAbsent(device)) return ffi::Error::Success();
  const TransferConfig& config = state->config;
  TransferSizes sizes;
  RedispatchCall call = {
      .transfer = {}, .zero_tail = config.zero_tail, .has_weights = config.has_weights};
  Status status = CheckCallBuffers(CheckRedispatch, config, operands, results, &sizes);
  if (status.ok()) status = MakeTransferCall(*state, sizes, device, &call.transfer);
  if (!status.ok()) return Launched(*state, device, status);
  Addresses in(operands);
  call.x = in.Next();
  call.plan = NextPlanOperands(in);
  if (config.has_weights) call.topk_weights = in.Next<const float>();
  Addresses out(results);
  call.rows = out.Next();
  if (config.has_weights) call.row_weights = out.Next<float>();
  return Launched(*state, device, LaunchRedispatch(call, stream));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<TransferState>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Target RedispatchHandlers() { return TransferTarget(kRedispatchTarget, kInstantiate, kExecute); }

}  // namespace jax_ep
