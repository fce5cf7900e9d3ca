#include "ffi/kernels/matmul/grouped_matmul.h"

#include <type_traits>

#include "ffi/handlers/matmul.h"
#include "ffi/handlers/operations.h"

namespace jax_ep {
namespace {

// Multiplies each group's rows by the group's matrix.
using State = GroupedMatmulState;
using Config = GroupedMatmulConfig;
using Sizes = GroupedMatmulSizes;
using Check = BufferCheck<Config, Sizes>;
using Launch = decltype(&LaunchGroupedMatmul);
static_assert(std::is_same_v<Launch, decltype(&LaunchGroupedMatmulRhsGradient)>);

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
  return InstantiateLocal<State>(kGroupedMatmulTarget, CheckForward, attributes, operands, results);
}

auto InstantiateRhsGradient(ffi::RemainingArgs operands, ffi::RemainingRets results,
                            ffi::Dictionary attributes) {
  return InstantiateLocal<State>(kGroupedMatmulRhsGradientTarget, CheckRhsGradient, attributes,
                                 operands, results);
}

ffi::Error ExecuteMatmul(Check check, Launch launch, State* state, cudaStream_t stream,
                         const ffi::RemainingArgs& operands, const ffi::RemainingRets& results) {
  Sizes sizes;
  Status status = CheckCallBuffers(check, state->config, operands, results, &sizes);
  if (!status.ok()) return ToError(status);
  // The check has found three operands, perhaps an accumulator, and one result.
  const auto operand = [&](size_t i) { return operands.get<ffi::AnyBuffer>(i)->untyped_data(); };
  void* const result = (**results.get<ffi::AnyBuffer>(0)).untyped_data();
  if (state->config.has_accumulator && operand(3) != result) {
    return ToError(InvalidArgument(state->target, ": the accumulator and the result are two ",
                                   "buffers; expected output_operand_aliases that make them one"));
  }
  status =
      launch(state->config, sizes, operand(0), operand(1), static_cast<const int32_t*>(operand(2)),
             result, state->tile_counter.number(), stream);
  return ToError(At(state->target, status));
}

ffi::Error Execute(State* state, cudaStream_t stream, int32_t /*device*/,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return ExecuteMatmul(CheckForward, LaunchGroupedMatmul, state, stream, operands, results);
}

ffi::Error ExecuteRhsGradient(State* state, cudaStream_t stream, int32_t /*device*/,
                              ffi::RemainingArgs operands, ffi::RemainingRets results) {
  return ExecuteMatmul(CheckRhsGradient, LaunchGroupedMatmulRhsGradient, state, stream, operands,
                       results);
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kInstantiateRhsGradient, InstantiateRhsGradient, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<State>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kExecuteRhsGradient, ExecuteRhsGradient, ExecuteBinding<State>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Target GroupedMatmulHandlers() {
  return LocalTarget<State>(kGroupedMatmulTarget, kInstantiate, kExecute);
}

Target GroupedMatmulRhsGradientHandlers() {
  return LocalTarget<State>(kGroupedMatmulRhsGradientTarget, kInstantiateRhsGradient,
                            kExecuteRhsGradient);
}

}  // namespace jax_ep
