#include "ffi/handlers/matmul/matmul.h"
#include "ffi/kernels/matmul/grouped_matmul_fp8.h"
#include "ffi/kernels/matmul/launch.h"

namespace jax_ep {
namespace {

// Multiplies each group's rows by the group's matrix, both of 8-bit values with scales.
using Config = GroupedMatmulQuantizedConfig;
using Sizes = GroupedMatmulSizes;
constexpr char kStateName[] = "jax_ep.GroupedMatmulQuantizedState.v1";
using State = MatmulState<Config, kStateName>;

Status Check(const Config& config, Buffers operands, Buffers results, Sizes* sizes) {
  Status status = CheckGroupedMatmulQuantized(config, operands, results, sizes);
  if (!status.ok()) return status;
  return At(kGroupedMatmulQuantizedTarget, CheckGroupedMatmulFp8Launch(config.num_sms, *sizes));
}

Fp8Kind KindOf(const Config& config, const Sizes& sizes) {
  if (config.scale_block > 0) return Fp8Kind::kBlock128;
  return sizes.lhs_type == kF8E5M2 ? Fp8Kind::kRowE5M2 : Fp8Kind::kRow;
}

void Decode(AttributeReader& reader, Config* config) {
  reader.Read("scale_block", &config->scale_block);
  reader.Read("zero_tail", &config->zero_tail);
  reader.Read("num_sms", &config->num_sms);
}

constexpr Contract<Config, Sizes> kContract = {kGroupedMatmulQuantizedTarget, Decode, Check};

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
  const Fp8Matmul call = {.kind = KindOf(state->config, sizes),
                          .lhs = operand.Next(),
                          .lhs_scales = operand.Next<const float>(),
                          .rhs = operand.Next(),
                          .rhs_scales = operand.Next<const float>(),
                          .group_sizes = operand.Next<const int32_t>(),
                          .out = AddressOf(results, 0),
                          .zero_tail = state->config.zero_tail,
                          .num_sms = state->config.num_sms};
  status = LaunchGroupedMatmulFp8(call, sizes, state->tile_counter.number(), stream);
  return ToError(At(state->target, status));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute, ExecuteBinding<State>(),
                       {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers GroupedMatmulQuantizedHandlers() {
  return LocalHandlers<State>(kGroupedMatmulQuantizedTarget, LoadMatmulKernels, kInstantiate,
                              kExecute);
}

}  // namespace jax_ep
