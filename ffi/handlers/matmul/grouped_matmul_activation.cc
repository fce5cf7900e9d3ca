#include "ffi/kernels/matmul/grouped_matmul_activation.h"

#include "ffi/handlers/matmul/matmul.h"
#include "ffi/kernels/matmul/launch.h"

namespace jax_ep {
namespace {

using Config = GroupedMatmulActivationConfig;
using Sizes = GroupedMatmulSizes;
constexpr char kStateName[] = "jax_ep.GroupedMatmulActivationState.v1";
using State = MatmulState<Config, kStateName>;

Status CheckForward(const Config& config, Buffers operands, Buffers results, Sizes* sizes) {
  Status status = CheckGroupedMatmulActivation(config, operands, results, sizes);
  if (!status.ok()) return status;
  return At(kGroupedMatmulActivationTarget, CheckGroupedMatmulActivationLaunch(config, *sizes));
}

Status CheckGradient(const Config& config, Buffers operands, Buffers results, Sizes* sizes) {
  Status status = CheckGroupedMatmulActivationGradient(config, operands, results, sizes);
  if (!status.ok()) return status;
  return At(kGroupedMatmulActivationGradientTarget,
            CheckGroupedMatmulActivationLaunch(config, *sizes));
}

void DecodeGradient(AttributeReader& reader, Config* config) {
  reader.Read("activation", &config->activation);
  reader.Read("has_row_weights", &config->has_row_weights);
  reader.Read("num_sms", &config->num_sms);
}

void DecodeForward(AttributeReader& reader, Config* config) {
  reader.Read("has_bias", &config->has_bias);
  reader.Read("keep_pre_activation", &config->keep_pre_activation);
  DecodeGradient(reader, config);
}

constexpr Contract<Config, Sizes> kForward = {kGroupedMatmulActivationTarget, DecodeForward,
                                              CheckForward};
constexpr Contract<Config, Sizes> kGradient = {kGroupedMatmulActivationGradientTarget,
                                               DecodeGradient, CheckGradient};

auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateLocal<State>(kForward, attributes, operands, results);
}

auto InstantiateGradient(ffi::RemainingArgs operands, ffi::RemainingRets results,
                         ffi::Dictionary attributes) {
  return InstantiateLocal<State>(kGradient, attributes, operands, results);
}

ffi::Error Execute(State* state, cudaStream_t stream, int32_t /*device*/,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  const Config& config = state->config;
  Sizes sizes;
  Status status = CheckCallBuffers(CheckForward, config, operands, results, &sizes);
  if (!status.ok()) return ToError(status);
  Addresses in(operands);
  Addresses out(results);
  GroupedMatmulActivationBuffers buffers = {};
  buffers.lhs = in.Next();
  buffers.rhs = in.Next();
  buffers.group_sizes = in.Next<int32_t>();
  if (config.has_bias) buffers.bias = in.Next<float>();
  if (config.has_row_weights) buffers.row_weights = in.Next<float>();
  buffers.out = out.Next();
  if (config.keep_pre_activation) buffers.pre_activation = out.Next();
  status =
      LaunchGroupedMatmulActivation(config, sizes, buffers, state->tile_counter.number(), stream);
  return ToError(At(state->target, status));
}

ffi::Error ExecuteGradient(State* state, cudaStream_t stream, int32_t /*device*/,
                           ffi::RemainingArgs operands, ffi::RemainingRets results) {
  const Config& config = state->config;
  Sizes sizes;
  Status status = CheckCallBuffers(CheckGradient, config, operands, results, &sizes);
  if (!status.ok()) return ToError(status);
  Addresses in(operands);
  Addresses out(results);
  GroupedMatmulActivationGradientBuffers buffers = {};
  buffers.out_gradient = in.Next();
  buffers.rhs = in.Next();
  buffers.group_sizes = in.Next<int32_t>();
  buffers.pre_activation = in.Next();
  if (config.has_row_weights) buffers.row_weights = in.Next<float>();
  buffers.pre_activation_gradient = out.Next();
  buffers.activations = out.Next();
  buffers.row_dots = out.Next<float>();
  status = LaunchGroupedMatmulActivationGradient(config, sizes, buffers,
                                                 state->tile_counter.number(), stream);
  return ToError(At(state->target, status));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kInstantiateGradient, InstantiateGradient, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<State>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kExecuteGradient, ExecuteGradient, ExecuteBinding<State>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers GroupedMatmulActivationHandlers() {
  return LocalHandlers<State>(kGroupedMatmulActivationTarget, LoadMatmulKernels, kInstantiate,
                              kExecute);
}

Handlers GroupedMatmulActivationGradientHandlers() {
  return LocalHandlers<State>(kGroupedMatmulActivationGradientTarget, LoadMatmulKernels,
                              kInstantiateGradient, kExecuteGradient);
}

}  // namespace jax_ep
