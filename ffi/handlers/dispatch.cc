#include "ffi/handlers/operations.h"
#include "ffi/handlers/transfer.h"
#include "ffi/runtime/settings.h"

namespace jax_ep {
namespace {

// Sends x and topk_weights by topk_ids. Returns the rows of the local experts, and the plan.
auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateCall<TransferState>(kDispatchTarget, CheckDispatch, attributes, operands,
                                        results);
}

ffi::Error Execute(TransferState* state, cudaStream_t stream, int32_t device,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  if (IsAbsent(device)) return ffi::Error::Success();
  const TransferConfig& config = state->config;
  TransferSizes sizes;
  DispatchCall call = {.transfer = {},
                       .row_align = config.row_align,
                       .zero_tail = config.zero_tail,
                       .has_weights = config.has_weights};
  Status status = CheckCallBuffers(CheckDispatch, config, operands, results, &sizes);
  if (status.ok()) status = MakeTransferCall(*state, sizes, device, &call.transfer);
  if (!status.ok()) return Launched(*state, device, status);
  Addresses in(operands);
  call.x = in.Next();
  call.topk_ids = in.Next<const int32_t>();
  if (config.has_weights) call.topk_weights = in.Next<const float>();
  Addresses out(results);
  call.rows = out.Next();
  if (config.has_weights) call.row_weights = out.Next<float>();
  call.plan = NextPlanResults(out);
  return Launched(*state, device, LaunchDispatch(call, stream));
}

// The trait promises that execute only launches kernels, so that CUDA graphs can capture it.
XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<TransferState>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Target DispatchHandlers() { return TransferTarget(kDispatchTarget, kInstantiate, kExecute); }

}  // namespace jax_ep
