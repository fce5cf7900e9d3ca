#include "ffi/handlers/quantize.h"

#include "ffi/handlers/operations.h"
#include "ffi/kernels/quantize/quantize.h"

namespace jax_ep {
namespace {

// Quantizes rows to 8-bit values with scales.
using State = QuantizeState;
using Config = QuantizeConfig;
using Sizes = QuantizeSizes;

Status Check(const Config& config, Buffers operands, Buffers results, Sizes* sizes) {
  Status status = CheckQuantize(config, operands, results, sizes);
  if (!status.ok()) return status;
  return At(kQuantizeTarget, CheckQuantizeLaunch(sizes->num_rows, sizes->columns));
}

QuantizeKind KindOf(const Config& config) {
  if (config.scale_block > 0) return QuantizeKind::kBlock128;
  return config.is_e5m2 ? QuantizeKind::kRowE5M2 : QuantizeKind::kRow;
}

auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateLocal<State>(kQuantizeTarget, Check, attributes, operands, results);
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

Target QuantizeHandlers() { return LocalTarget<State>(kQuantizeTarget, kInstantiate, kExecute); }

}  // namespace jax_ep
