#include "ffi/kernels/matmul/grouped_matmul.h"

#include <type_traits>

#include "ffi/handlers/matmul/matmul.h"
#include "ffi/kernels/matmul/launch.h"

namespace jax_ep {
namespace {

// Multiplies each group's rows by the group's matrix.
using Config = GroupedMatmulConfig;
using Sizes = GroupedMatmulSizes;
constexpr char kStateName[] = "jax_ep.GroupedMatmulState.v1";
using State = MatmulState<Config, kStateName>;
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

void DecodeForward(AttributeReader& reader, Config* config) {
  reader.Read("transpose_rhs", &config->transpose_rhs);
  reader.Read("num_sms", &config->num_sms);
  reader.Read("zero_tail", &config->zero_tail);
}

void DecodeRhsGradient(AttributeReader& reader, Config* config) {
  reader.Read("transpose_rhs", &config->transpose_rhs);
  reader.Read("num_sms", &config->num_sms);
  reader.Read("has_accumulator", &config->has_accumulator);
}

constexpr Contract<Config, Sizes> kForward = {kGroupedMatmulTarget, DecodeForward, CheckForward};
constexpr Contract<Config, Sizes> kRhsGradient = {kGroupedMatmulRhsGradientTarget,
                                                  DecodeRhsGradient, CheckRhsGradient};

auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateLocal<State>(kForward, attributes, operands, results);
}

auto InstantiateRhsGradient(ffi::RemainingArgs operands, ffi::RemainingRets results,
                            ffi::Dictionary attributes) {
  return InstantiateLocal<State>(kRhsGradient, attributes, operands, results);
}

ffi::Error ExecuteMatmul(Check check, Launch launch, State* state, cudaStream_t stream,
                         const ffi::RemainingArgs& operands, const ffi::RemainingRets& results) {
  Sizes sizes;
  Status status = CheckCallBuffers(check, state->config, operands, results, &sizes);
  if (!status.ok()) return ToError(status);
  // The check has found three operands, perhaps an accumulator, and one result.
  const auto operand = [&](size_t i) { return operands.get<ffi::AnyBuffer>(i)->untyped_data(); };
  void* const result = (**results.get<ffi::AnyBuffer>(0)).untyped_data();
  if (state->config.has_accumulator) status = CheckInPlace(state->target, operand(3), result);
  if (!status.ok()) return ToError(status);
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

Handlers GroupedMatmulHandlers() {
  return LocalHandlers<State>(kGroupedMatmulTarget, LoadMatmulKernels, kInstantiate, kExecute);
}

Handlers GroupedMatmulRhsGradientHandlers() {
  return LocalHandlers<State>(kGroupedMatmulRhsGradientTarget, LoadMatmulKernels,
                              kInstantiateRhsGradient, kExecuteRhsGradient);
}

}  // namespace jax_ep
