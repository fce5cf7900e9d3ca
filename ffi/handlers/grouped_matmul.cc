#include "ffi/handlers/call.h"
#include "ffi/handlers/operations.h"

namespace jax_ep {
namespace {

// One matmul for each local expert. Nothing leaves the device, so there is no communicator.
auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateCall<GroupedMatmulState>(kGroupedMatmulTarget, CheckGroupedMatmul, attributes, operands, results);
}

auto InstantiateRhsGradient(ffi::RemainingArgs operands, ffi::RemainingRets results,
                            ffi::Dictionary attributes) {
  return InstantiateCall<GroupedMatmulState>(kGroupedMatmulRhsGradientTarget, CheckGroupedMatmulRhsGradient, attributes,
                         operands, results);
}

// Once an execution and device, before any device launches. The place to load kernels.
ffi::Error Prepare(GroupedMatmulState* state, int32_t /*device*/) {
  return ToError(NoKernels(state->target));
}

// After prepare, on the stream of the execution.
ffi::Error Initialize(GroupedMatmulState* state, cudaStream_t /*stream*/, int32_t /*device*/) {
  return ToError(NoKernels(state->target));
}

ffi::Error Execute(GroupedMatmulState* state, cudaStream_t /*stream*/, int32_t /*device*/,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  GroupedMatmulSizes sizes;
  Status status = CheckCallBuffers(CheckGroupedMatmul, state->config, operands, results, &sizes);
  if (status.ok()) status = NoKernels(state->target);
  return ToError(status);
}

ffi::Error ExecuteRhsGradient(GroupedMatmulState* state, cudaStream_t /*stream*/,
                              int32_t /*device*/, ffi::RemainingArgs operands,
                              ffi::RemainingRets results) {
  GroupedMatmulSizes sizes;
  Status status =
      CheckCallBuffers(CheckGroupedMatmulRhsGradient, state->config, operands, results, &sizes);
  if (status.ok()) status = NoKernels(state->target);
  return ToError(status);
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kInstantiateRhsGradient, InstantiateRhsGradient, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(
    kPrepare, Prepare,
    ffi::Ffi::BindPrepare().Ctx<ffi::State<GroupedMatmulState>>().Ctx<ffi::DeviceOrdinal>());
XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize,
                       ffi::Ffi::BindInitialize()
                           .Ctx<ffi::State<GroupedMatmulState>>()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<GroupedMatmulState>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kExecuteRhsGradient, ExecuteRhsGradient,
                       ExecuteBinding<GroupedMatmulState>(), {ffi::Traits::kCmdBufferCompatible});

Target Handlers(const char* name, XLA_FFI_Handler* instantiate, XLA_FFI_Handler* execute) {
  return {name, Address(instantiate), Address(kPrepare), Address(kInitialize), Address(execute)};
}

}  // namespace

Target GroupedMatmulHandlers() { return Handlers(kGroupedMatmulTarget, kInstantiate, kExecute); }

Target GroupedMatmulRhsGradientHandlers() {
  return Handlers(kGroupedMatmulRhsGradientTarget, kInstantiateRhsGradient, kExecuteRhsGradient);
}

}  // namespace jax_ep
