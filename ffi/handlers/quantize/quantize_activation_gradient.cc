#include "ffi/kernels/quantize/quantize_activation_gradient.h"

#include "ffi/handlers/quantize/quantize.h"

namespace jax_ep {
namespace {

// Computes gradients of gated activations, quantized as both gradients of a layer read them.
using Config = QuantizeActivationGradientConfig;
using Sizes = QuantizeTransposedSizes;
constexpr char kStateName[] = "jax_ep.QuantizeActivationGradientState.v1";
using State = StateOfQuantizing<Config, kStateName>;

Status Check(const Config& config, Buffers operands, Buffers results, Sizes* sizes) {
  Status status = CheckQuantizeActivationGradient(config, operands, results, sizes);
  if (!status.ok()) return status;
  return At(
      kQuantizeActivationGradientTarget,
      CheckQuantizeActivationGradientLaunch(sizes->num_rows, sizes->columns, sizes->row_blocks));
}

void Decode(AttributeReader& reader, Config* config) {
  reader.Read("activation", &config->activation);
  reader.Read("has_row_weights", &config->has_row_weights);
  ReadScaleOptions(reader, config);
  reader.Read("activation_min_amax", &config->activation_min_amax);
  reader.Read("activation_power_of_two_scales", &config->activation_power_of_two_scales);
}

constexpr Contract<Config, Sizes> kContract = {kQuantizeActivationGradientTarget, Decode, Check};

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
  Addresses operand(operands);
  Addresses result(results);
  QuantizeActivationGradient call = {
      .activation = config.activation,
      .num_rows = sizes.num_rows,
      .columns = sizes.columns,
      .row_blocks = sizes.row_blocks,
      .of_activations = {config.activation_min_amax, config.activation_power_of_two_scales},
      .of_gradient = {config.min_amax, config.power_of_two_scales},
      .activations_gradient = operand.Next(),
      .pre_activation = operand.Next()};
  call.first_rows = operand.Next<const int32_t>();
  call.block_rows = operand.Next<const int32_t>();
  if (config.has_row_weights) call.row_weights = operand.Next<const float>();
  call.row_values = result.Next<uint8_t>();
  call.row_scales = result.Next<float>();
  call.values = result.Next<uint8_t>();
  call.scales = result.Next<float>();
  call.activation_values = result.Next<uint8_t>();
  call.activation_scales = result.Next<float>();
  call.row_dots = result.Next<float>();
  return ToError(At(state->target, LaunchQuantizeActivationGradient(call, stream)));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<State>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers QuantizeActivationGradientHandlers() {
  return LocalHandlers<State>(kQuantizeActivationGradientTarget,
                              LoadQuantizeActivationGradientKernels, kInstantiate, kExecute);
}

}  // namespace jax_ep
