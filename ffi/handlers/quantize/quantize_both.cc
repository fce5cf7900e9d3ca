#include "ffi/handlers/quantize/quantize.h"
#include "ffi/kernels/quantize/quantize_transposed.h"

namespace jax_ep {
namespace {

// Quantizes the rows of groups as they are, and to row blocks of 128, transposed.
using Config = QuantizeBothConfig;
using Sizes = QuantizeTransposedSizes;
constexpr char kStateName[] = "jax_ep.QuantizeBothState.v1";
using State = StateOfQuantizing<Config, kStateName>;

Status Check(const Config& config, Buffers operands, Buffers results, Sizes* sizes) {
  Status status = CheckQuantizeBoth(config, operands, results, sizes);
  if (!status.ok()) return status;
  return At(kQuantizeBothTarget,
            CheckQuantizeTransposedLaunch(sizes->num_rows, sizes->columns, sizes->row_blocks));
}

void Decode(AttributeReader& reader, Config* config) {
  reader.Read("per_column", &config->per_column);
  ReadScaleOptions(reader, config);
}

constexpr Contract<Config, Sizes> kContract = {kQuantizeBothTarget, Decode, Check};

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
                             .min_amax = config.min_amax,
                             .power_of_two_scales = config.power_of_two_scales,
                             .x = operand.Next()};
  call.first_rows = operand.Next<const int32_t>();
  call.block_rows = operand.Next<const int32_t>();
  call.row_values = result.Next<uint8_t>();
  call.row_scales = result.Next<float>();
  call.values = result.Next<uint8_t>();
  call.scales = result.Next<float>();
  return ToError(At(state->target, LaunchQuantizeTransposed(call, stream)));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<State>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers QuantizeBothHandlers() {
  return LocalHandlers<State>(kQuantizeBothTarget, LoadQuantizeTransposedKernels, kInstantiate,
                              kExecute);
}

}  // namespace jax_ep
