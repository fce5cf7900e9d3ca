#include "ffi/handlers/matmul/matmul.h"
#include "ffi/kernels/matmul/grouped_matmul_mxfp4.h"
#include "ffi/kernels/matmul/launch.h"

namespace jax_ep {
namespace {

// Multiplies rows by MXFP4 weights, adds a bias, activates and weighs.
using Config = GroupedMatmulMxFp4ActivationConfig;
using Sizes = GroupedMatmulSizes;
constexpr char kStateName[] = "jax_ep.GroupedMatmulMxFp4ActivationState.v1";
using State = MatmulState<Config, kStateName>;

Status Check(const Config& config, Buffers operands, Buffers results, Sizes* sizes) {
  Status status = CheckGroupedMatmulMxFp4Activation(config, operands, results, sizes);
  if (!status.ok()) return status;
  return At(kGroupedMatmulMxFp4ActivationTarget,
            CheckGroupedMatmulMxFp4ActivationLaunch(config, *sizes));
}

void Decode(AttributeReader& reader, Config* config) {
  reader.Read("activation", &config->epilogue.activation);
  reader.Read("limit", &config->limit);
  reader.Read("alpha", &config->alpha);
  reader.Read("has_bias", &config->epilogue.has_bias);
  reader.Read("has_row_weights", &config->epilogue.has_row_weights);
  reader.Read("keep_pre_activation", &config->epilogue.keep_pre_activation);
  reader.Read("num_sms", &config->epilogue.num_sms);
}

constexpr Contract<Config, Sizes> kContract = {kGroupedMatmulMxFp4ActivationTarget, Decode, Check};

auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateLocal<State>(kContract, attributes, operands, results);
}

ffi::Error Execute(State* state, cudaStream_t stream, int32_t /*device*/,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  const Config& config = state->config;
  Sizes sizes;
  Status status = CheckCallBuffers(&Check, config, operands, results, &sizes);
  if (!status.ok()) return ToError(status);
  Addresses in(operands);
  Addresses out(results);
  const MxFp4Matmul call = {.lhs = in.Next(),
                            .rhs = in.Next(),
                            .rhs_scales = in.Next<const uint8_t>(),
                            .group_sizes = in.Next<const int32_t>(),
                            .out = out.Next(),
                            .zero_tail = false,
                            .num_sms = config.epilogue.num_sms};
  MxFp4Activation activation = {.activation = config.epilogue.activation,
                                .limit = config.limit,
                                .alpha = config.alpha,
                                .bias = nullptr,
                                .row_weights = nullptr,
                                .pre_activation = nullptr};
  if (config.epilogue.has_bias) activation.bias = in.Next<const float>();
  if (config.epilogue.has_row_weights) activation.row_weights = in.Next<const float>();
  if (config.epilogue.keep_pre_activation) activation.pre_activation = out.Next();
  status = LaunchGroupedMatmulMxFp4Activation(call, activation, sizes, state->tile_counter.number(),
                                              stream);
  return ToError(At(state->target, status));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<State>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers GroupedMatmulMxFp4ActivationHandlers() {
  return LocalHandlers<State>(kGroupedMatmulMxFp4ActivationTarget, LoadMatmulKernels, kInstantiate,
                              kExecute);
}

}  // namespace jax_ep
