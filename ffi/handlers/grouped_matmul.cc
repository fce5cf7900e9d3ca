#include "ffi/kernels/grouped_matmul.h"

#include <type_traits>

#include "ffi/handlers/call.h"
#include "ffi/handlers/operations.h"

namespace jax_ep {
namespace {

// One matmul for each local expert. Nothing leaves the device, so there is no communicator.
using Config = GroupedMatmulConfig;
using Sizes = GroupedMatmulSizes;
using Check = BufferCheck<Config, Sizes>;
using Launch = decltype(&LaunchGroupedMatmul);
static_assert(std::is_same_v<Launch, decltype(&LaunchGroupedMatmulRhsGradient)>);

Status At(const char* target, Status status) {
  if (!status.ok()) status.message = Concatenate(target, ": ", status.message);
  return status;
}

Status CheckForward(const Config& config, Buffers operands, Buffers results, Sizes* sizes) {
  Status status = CheckGroupedMatmul(config, operands, results, sizes);
  if (!status.ok()) return status;
  return At(kGroupedMatmulTarget, CheckGroupedMatmulLaunch(config, *sizes));
}

Status CheckRhsGradient(const Config& config, Buffers operands, Buffers results, Sizes* sizes) {
  Status status = CheckGroupedMatmulRhsGradient(config, operands, results, sizes);
  if (!status.ok()) return status;
  return At(kGroupedMatmulRhsGradientTarget, CheckGroupedMatmulRhsGradientLaunch(config, *sizes));
}

auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateCall<GroupedMatmulState>(kGroupedMatmulTarget, CheckForward, attributes,
                                             operands, results);
}

auto InstantiateRhsGradient(ffi::RemainingArgs operands, ffi::RemainingRets results,
                            ffi::Dictionary attributes) {
  return InstantiateCall<GroupedMatmulState>(kGroupedMatmulRhsGradientTarget, CheckRhsGradient,
                                             attributes, operands, results);
}

// Once an execution and device, before any device launches.
ffi::Error Prepare(GroupedMatmulState* state, int32_t device) {
  return ToError(At(state->target, LoadMatmulsOnce(device)));
}

ffi::Error Initialize(GroupedMatmulState* /*state*/) { return ffi::Error::Success(); }

ffi::Error ExecuteMatmul(Check check, Launch launch, GroupedMatmulState* state, cudaStream_t stream,
                         const ffi::RemainingArgs& operands, const ffi::RemainingRets& results) {
  Sizes sizes;
  Status status = CheckCallBuffers(check, state->config, operands, results, &sizes);
  if (!status.ok()) return ToError(status);
  // The check has seen three operands and one result.
  const auto operand = [&](size_t i) { return operands.get<ffi::AnyBuffer>(i)->untyped_data(); };
  void* const result = (**results.get<ffi::AnyBuffer>(0)).untyped_data();
  status = launch(state->config, sizes, operand(0), operand(1),
                  static_cast<const int32_t*>(operand(2)), result, state->tile_counter, stream);
  return ToError(At(state->target, status));
}

ffi::Error Execute(GroupedMatmulState* state, cudaStream_t stream, int32_t /*device*/,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return ExecuteMatmul(CheckForward, LaunchGroupedMatmul, state, stream, operands, results);
}

ffi::Error ExecuteRhsGradient(GroupedMatmulState* state, cudaStream_t stream, int32_t /*device*/,
                              ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return ExecuteMatmul(CheckRhsGradient, LaunchGroupedMatmulRhsGradient, state, stream, operands,
                       results);
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kInstantiateRhsGradient, InstantiateRhsGradient, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(
    kPrepare, Prepare,
    ffi::Ffi::BindPrepare().Ctx<ffi::State<GroupedMatmulState>>().Ctx<ffi::DeviceOrdinal>());
XLA_FFI_DEFINE_HANDLER(kInitialize, Initialize,
                       ffi::Ffi::BindInitialize().Ctx<ffi::State<GroupedMatmulState>>());
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
