#include "ffi/handlers/quantize/quantize.h"

#include "ffi/kernels/quantize/quantize.h"

namespace jax_ep {
namespace {

// Quantizes rows to 8-bit values with scales.
using Config = QuantizeConfig;
using Sizes = QuantizeSizes;
constexpr char kStateName[] = "jax_ep.QuantizeState.v1";
using State = StateOfQuantizing<Config, kStateName>;

Status Check(const Config& config, Buffers operands, Buffers results, Sizes* sizes) {
  Status status = CheckQuantize(config, operands, results, sizes);
  if (!status.ok()) return status;
  return At(kQuantizeTarget, CheckQuantizeLaunch(sizes->num_rows, sizes->columns));
}

QuantizeKind KindOf(const Config& config) {
  if (config.scale_block > 0) return QuantizeKind::kBlock128;
  return config.is_e5m2 ? QuantizeKind::kRowE5M2 : QuantizeKind::kRow;
}

void Decode(AttributeReader& reader, Config* config) {
  reader.Read("scale_block", &config->scale_block);
  reader.Read("is_e5m2", &config->is_e5m2);
  ReadScaleOptions(reader, config);
}

constexpr Contract<Config, Sizes> kContract = {kQuantizeTarget, Decode, Check};

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
  const Quantize call = {.kind = KindOf(config),
                         .type = sizes.type,
                         .num_rows = sizes.num_rows,
                         .columns = sizes.columns,
                         .min_amax = config.min_amax,
                         .power_of_two_scales = config.power_of_two_scales,
                         .x = AddressOf(operands, 0),
                         .values = static_cast<uint8_t*>(AddressOf(results, 0)),
                         .scales = static_cast<float*>(AddressOf(results, 1))};
  return ToError(At(state->target, LaunchQuantize(call, stream)));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<State>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers QuantizeHandlers() {
  return LocalHandlers<State>(kQuantizeTarget, LoadQuantizeKernels, kInstantiate, kExecute);
}

}  // namespace jax_ep
