#include "ffi/handlers/matmul/matmul.h"
#include "ffi/kernels/matmul/grouped_matmul_fp8.h"
#include "ffi/kernels/matmul/launch.h"

namespace jax_ep {
namespace {

// Multiplies 8-bit rows by gate and up matrices, and quantizes the activations.
using Config = GroupedMatmulQuantizedActivationConfig;
using Sizes = GroupedMatmulSizes;
constexpr char kStateName[] = "jax_ep.GroupedMatmulQuantizedActivationState.v1";
using State = MatmulState<Config, kStateName>;

Status Check(const Config& config, Buffers operands, Buffers results, Sizes* sizes) {
  Status status = CheckGroupedMatmulQuantizedActivation(config, operands, results, sizes);
  if (!status.ok()) return status;
  return At(kGroupedMatmulQuantizedActivationTarget,
            CheckGroupedMatmulFp8ActivationLaunch(config.activation, config.num_sms, *sizes));
}

void Decode(AttributeReader& reader, Config* config) {
  reader.Read("keep_pre_activation", &config->keep_pre_activation);
  reader.Read("power_of_two_scales", &config->power_of_two_scales);
  reader.Read("activation", &config->activation);
  reader.Read("has_row_weights", &config->has_row_weights);
  reader.Read("num_sms", &config->num_sms);
}

constexpr Contract<Config, Sizes> kContract = {kGroupedMatmulQuantizedActivationTarget, Decode,
                                               Check};

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
  Fp8Matmul call = {.kind = Fp8Kind::kBlock128,
                    .lhs = in.Next(),
                    .lhs_scales = in.Next<const float>(),
                    .rhs = in.Next(),
                    .rhs_scales = in.Next<const float>(),
                    .group_sizes = in.Next<const int32_t>(),
                    .out = out.Next(),
                    .zero_tail = false,
                    .num_sms = config.num_sms};
  Fp8Activation activation = {.activation = config.activation,
                              .power_of_two_scales = config.power_of_two_scales,
                              .row_weights = nullptr,
                              .out_scales = out.Next<float>(),
                              .pre_activation = nullptr};
  if (config.has_row_weights) activation.row_weights = in.Next<const float>();
  if (config.keep_pre_activation) activation.pre_activation = out.Next();
  status = LaunchGroupedMatmulFp8Activation(call, activation, sizes, state->tile_counter.number(),
                                            stream);
  return ToError(At(state->target, status));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<State>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers GroupedMatmulQuantizedActivationHandlers() {
  return LocalHandlers<State>(kGroupedMatmulQuantizedActivationTarget, LoadMatmulKernels,
                              kInstantiate, kExecute);
}

}  // namespace jax_ep
