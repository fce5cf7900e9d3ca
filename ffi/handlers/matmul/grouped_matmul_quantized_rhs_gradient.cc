#include "ffi/handlers/matmul/matmul.h"
#include "ffi/kernels/matmul/grouped_matmul_fp8_rhs_gradient.h"
#include "ffi/kernels/matmul/launch.h"

namespace jax_ep {
namespace {

// Contracts each group's row blocks of two operands, both of 8-bit values with scales.
using Config = GroupedMatmulQuantizedRhsGradientConfig;
using Sizes = GroupedMatmulSizes;
constexpr char kStateName[] = "jax_ep.GroupedMatmulQuantizedRhsGradientState.v1";
using State = MatmulState<Config, kStateName>;

Status Check(const Config& config, Buffers operands, Buffers results, Sizes* sizes) {
  Status status = CheckGroupedMatmulQuantizedRhsGradient(config, operands, results, sizes);
  if (!status.ok()) return status;
  return At(kGroupedMatmulQuantizedRhsGradientTarget,
            CheckGroupedMatmulFp8RhsGradientLaunch(config, *sizes));
}

void Decode(AttributeReader& reader, Config* config) {
  reader.Read("has_accumulator", &config->has_accumulator);
  reader.Read("num_sms", &config->num_sms);
}

constexpr Contract<Config, Sizes> kContract = {kGroupedMatmulQuantizedRhsGradientTarget, Decode,
                                               Check};

auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  return InstantiateLocal<State>(kContract, attributes, operands, results);
}

ffi::Error Execute(State* state, cudaStream_t stream, int32_t /*device*/,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  Sizes sizes;
  Status status = CheckCallBuffers(&Check, state->config, operands, results, &sizes);
  if (!status.ok()) return ToError(status);
  Addresses operand(operands);
  const Fp8RhsGradient call = {.a = operand.Next(),
                               .a_scales = operand.Next<const float>(),
                               .b = operand.Next(),
                               .b_scales = operand.Next<const float>(),
                               .group_sizes = operand.Next<const int32_t>(),
                               .rhs_gradient = AddressOf(results, 0)};
  if (state->config.has_accumulator) {
    status = CheckInPlace(state->target, operand.Next(), call.rhs_gradient);
  }
  if (!status.ok()) return ToError(status);
  status = LaunchGroupedMatmulFp8RhsGradient(state->config, call, sizes,
                                             state->tile_counter.number(), stream);
  return ToError(At(state->target, status));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<State>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers GroupedMatmulQuantizedRhsGradientHandlers() {
  return LocalHandlers<State>(kGroupedMatmulQuantizedRhsGradientTarget, LoadMatmulKernels,
                              kInstantiate, kExecute);
}

}  // namespace jax_ep
