#include "ffi/kernels/quantize/quantize_transposed.h"

#include "ffi/handlers/quantize/quantize.h"

namespace jax_ep {
namespace {

// Quantizes the rows of groups to row blocks of 128, transposed.
using Config = QuantizeTransposedConfig;
using Sizes = QuantizeTransposedSizes;
constexpr char kStateName[] = "jax_ep.QuantizeTransposedState.v1";
using State = StateOfQuantizing<Config, kStateName>;

Status Check(const Config& config, Buffers operands, Buffers results, Sizes* sizes) {
  Status status = CheckQuantizeTransposed(config, operands, results, sizes);
  if (!status.ok()) return status;
  return At(kQuantizeTransposedTarget,
            CheckQuantizeTransposedLaunch(sizes->num_rows, sizes->columns, sizes->row_blocks));
}

void Decode(AttributeReader& reader, Config* config) {
  reader.Read("is_quantized", &config->is_quantized);
  reader.Read("per_column", &config->per_column);
  reader.Read("zero_tail", &config->zero_tail);
  ReadScaleOptions(reader, config);
}

constexpr Contract<Config, Sizes> kContract = {kQuantizeTransposedTarget, Decode, Check};

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
  QuantizeTransposed call = {.type = sizes.type,
                             .num_rows = sizes.num_rows,
                             .columns = sizes.columns,
                             .row_blocks = sizes.row_blocks,
                             .per_column = config.per_column,
                             .zero_tail = config.zero_tail,
                             .min_amax = config.min_amax,
                             .power_of_two_scales = config.power_of_two_scales,
                             .x = operand.Next(),
                             .x_scales_per_row = sizes.x_scales};
  if (config.is_quantized) call.x_scales = operand.Next<const float>();
  call.first_rows = operand.Next<const int32_t>();
  call.block_rows = operand.Next<const int32_t>();
  call.values = result.Next<uint8_t>();
  call.scales = result.Next<float>();
  return ToError(At(state->target, LaunchQuantizeTransposed(call, stream)));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<State>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers QuantizeTransposedHandlers() {
  return LocalHandlers<State>(kQuantizeTransposedTarget, LoadQuantizeTransposedKernels,
                              kInstantiate, kExecute);
}

}  // namespace jax_ep
