#include "ffi/handlers/matmul/matmul.h"
#include "ffi/kernels/matmul/grouped_matmul_mxfp4.h"
#include "ffi/kernels/matmul/launch.h"

namespace jax_ep {
namespace {

// Multiplies the gradient of grouped_matmul_mxfp4's result by the same matrices.
using Config = GroupedMatmulMxFp4Config;
using Sizes = GroupedMatmulSizes;
constexpr char kStateName[] = "jax_ep.GroupedMatmulMxFp4LhsGradientState.v1";
using State = MatmulState<Config, kStateName>;

Status Check(const Config& config, Buffers operands, Buffers results, Sizes* sizes) {
  Status status = CheckGroupedMatmulMxFp4LhsGradient(config, operands, results, sizes);
  if (!status.ok()) return status;
  return At(kGroupedMatmulMxFp4LhsGradientTarget,
            CheckGroupedMatmulMxFp4LhsGradientLaunch(config.num_sms, *sizes));
}

void Decode(AttributeReader& reader, Config* config) {
  reader.Read("zero_tail", &config->zero_tail);
  reader.Read("num_sms", &config->num_sms);
}

constexpr Contract<Config, Sizes> kContract = {kGroupedMatmulMxFp4LhsGradientTarget, Decode, Check};

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
  const MxFp4Matmul call = {.lhs = operand.Next(),
                            .rhs = operand.Next(),
                            .rhs_scales = operand.Next<const uint8_t>(),
                            .group_sizes = operand.Next<const int32_t>(),
                            .out = AddressOf(results, 0),
                            .zero_tail = state->config.zero_tail,
                            .num_sms = state->config.num_sms};
  status = LaunchGroupedMatmulMxFp4LhsGradient(call, sizes, state->tile_counter.number(), stream);
  return ToError(At(state->target, status));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<State>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers GroupedMatmulMxFp4LhsGradientHandlers() {
  return LocalHandlers<State>(kGroupedMatmulMxFp4LhsGradientTarget, LoadMatmulKernels, kInstantiate,
                              kExecute);
}

}  // namespace jax_ep
