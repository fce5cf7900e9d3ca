#include "ffi/kernels/quantize/quantize_weights.h"

#include "ffi/handlers/quantize/quantize.h"

namespace jax_ep {
namespace {

// Quantizes matrices in blocks of 128 x 128, in one layout or both.
using Config = QuantizeWeightsConfig;
using Sizes = QuantizeWeightsSizes;
constexpr char kStateName[] = "jax_ep.QuantizeWeightsState.v1";
using State = StateOfQuantizing<Config, kStateName>;

Status Check(const Config& config, Buffers operands, Buffers results, Sizes* sizes) {
  Status status = CheckQuantizeWeights(config, operands, results, sizes);
  if (!status.ok()) return status;
  return At(kQuantizeWeightsTarget,
            CheckQuantizeWeightsLaunch(sizes->num_matrices, sizes->rows, sizes->total_columns));
}

// Returns where the layouts go that are asked for.
WeightLayouts LayoutsOf(const Config& config, const Sizes& sizes,
                        const ffi::RemainingRets& results) {
  WeightLayouts layouts = {.total_columns = sizes.total_columns};
  Addresses result(results);
  if (config.as_given) {
    layouts.as_given.values = result.Next<uint8_t>();
    layouts.as_given.scales = result.Next<float>();
  }
  if (config.transposed) {
    layouts.transposed.values = result.Next<uint8_t>();
    layouts.transposed.scales = result.Next<float>();
  }
  return layouts;
}

void Decode(AttributeReader& reader, Config* config) {
  reader.Read("as_given", &config->as_given);
  reader.Read("transposed", &config->transposed);
  ReadScaleOptions(reader, config);
}

constexpr Contract<Config, Sizes> kContract = {kQuantizeWeightsTarget, Decode, Check};

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
  WeightLayouts layouts = LayoutsOf(config, sizes, results);
  QuantizeWeights call = {.type = sizes.type,
                          .num_matrices = sizes.num_matrices,
                          .rows = sizes.rows,
                          .min_amax = config.min_amax,
                          .power_of_two_scales = config.power_of_two_scales};
  Addresses x(operands);
  for (int64_t columns : sizes.columns) {
    call.columns = columns;
    call.x = x.Next();
    status = LaunchQuantizeWeights(call, layouts, stream);
    if (!status.ok()) break;
    layouts.first_column += columns;
  }
  return ToError(At(state->target, status));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<State>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers QuantizeWeightsHandlers() {
  return LocalHandlers<State>(kQuantizeWeightsTarget, LoadQuantizeWeightsKernels, kInstantiate,
                              kExecute);
}

}  // namespace jax_ep
