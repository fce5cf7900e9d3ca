#include "ffi/handlers/operations.h"
#include "ffi/handlers/transfer.h"

namespace jax_ep {
namespace {

// x, topk_ids and weights go out; the rows of the local experts and the plan come back.
auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateCall(kDispatchTarget, CheckDispatch, attributes, operands, results);
}

// The same rows by a plan that is known, without an exchange of ids and counts.
auto InstantiateByPlan(ffi::RemainingArgs operands, ffi::RemainingRets results,
                       ffi::Dictionary attributes) {
  return InstantiateCall(kDispatchByPlanTarget, CheckDispatchByPlan, attributes, operands, results);
}

ffi::Error Execute(TransferState* state, cudaStream_t /*stream*/, int32_t /*device*/,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  TransferSizes sizes;
  Status status = CheckCallBuffers(CheckDispatch, state->config, operands, results, &sizes);
  if (status.ok()) status = NoKernels(state->target);
  return ToError(status);
}

ffi::Error ExecuteByPlan(TransferState* state, cudaStream_t /*stream*/, int32_t /*device*/,
                         ffi::RemainingArgs operands, ffi::RemainingRets results) {
  TransferSizes sizes;
  Status status = CheckCallBuffers(CheckDispatchByPlan, state->config, operands, results, &sizes);
  if (status.ok()) status = NoKernels(state->target);
  return ToError(status);
}

// The trait promises that execute only launches kernels: a CUDA graph may record and replay it.
XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kInstantiateByPlan, InstantiateByPlan, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<TransferConfig>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kExecuteByPlan, ExecuteByPlan, ExecuteBinding<TransferConfig>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Target DispatchHandlers() { return TransferTarget(kDispatchTarget, kInstantiate, kExecute); }

Target DispatchByPlanHandlers() {
  return TransferTarget(kDispatchByPlanTarget, kInstantiateByPlan, kExecuteByPlan);
}

}  // namespace jax_ep
