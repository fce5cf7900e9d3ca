#include "ffi/kernels/matmul/grouped_matmul_mxfp4.h"

#include "ffi/handlers/matmul/matmul.h"
#include "ffi/kernels/matmul/launch.h"

namespace jax_ep {
namespace {

using Config = GroupedMatmulMxFp4Config;
using Sizes = GroupedMatmulSizes;

// Multiplies each group's rows by the group's matrix, which has MXFP4 values.
struct Forward {
  static constexpr auto kTarget = kGroupedMatmulMxFp4Target;
  static constexpr char kStateName[] = "jax_ep.GroupedMatmulMxFp4State.v1";
  static constexpr auto kCheck = CheckGroupedMatmulMxFp4;
  static constexpr auto kCheckLaunch = CheckGroupedMatmulMxFp4Launch;
  static constexpr auto kLaunch = LaunchGroupedMatmulMxFp4;
};

// Multiplies the gradient of its result by the same matrices.
struct LhsGradient {
  static constexpr auto kTarget = kGroupedMatmulMxFp4LhsGradientTarget;
  static constexpr char kStateName[] = "jax_ep.GroupedMatmulMxFp4LhsGradientState.v1";
  static constexpr auto kCheck = CheckGroupedMatmulMxFp4LhsGradient;
  static constexpr auto kCheckLaunch = CheckGroupedMatmulMxFp4LhsGradientLaunch;
  static constexpr auto kLaunch = LaunchGroupedMatmulMxFp4LhsGradient;
};

template <typename Operation>
using State = MatmulState<Config, Operation::kStateName>;

template <typename Operation>
Status Check(const Config& config, Buffers operands, Buffers results, Sizes* sizes) {
  Status status = Operation::kCheck(config, operands, results, sizes);
  if (!status.ok()) return status;
  return At(Operation::kTarget, Operation::kCheckLaunch(config.num_sms, *sizes));
}

void Decode(AttributeReader& reader, Config* config) {
  reader.Read("zero_tail", &config->zero_tail);
  reader.Read("num_sms", &config->num_sms);
}

template <typename Operation>
auto Instantiate(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
  static constexpr Contract<Config, Sizes> kContract = {Operation::kTarget, Decode,
                                                        Check<Operation>};
  return InstantiateLocal<State<Operation>>(kContract, attributes, operands, results);
}

MxFp4Matmul CallOf(const Config& config, ffi::RemainingArgs operands, ffi::RemainingRets results) {
  Addresses operand(operands);
  return {.lhs = operand.Next(),
          .rhs = operand.Next(),
          .rhs_scales = operand.Next<const uint8_t>(),
          .group_sizes = operand.Next<const int32_t>(),
          .out = AddressOf(results, 0),
          .zero_tail = config.zero_tail,
          .num_sms = config.num_sms};
}

template <typename Operation>
ffi::Error Execute(State<Operation>* state, cudaStream_t stream, int32_t /*device*/,
                   ffi::RemainingArgs operands, ffi::RemainingRets results) {
  Sizes sizes;
  Status status = CheckCallBuffers(&Check<Operation>, state->config, operands, results, &sizes);
  if (!status.ok()) return ToError(status);
  const MxFp4Matmul call = CallOf(state->config, operands, results);
  status = Operation::kLaunch(call, sizes, state->tile_counter.number(), stream);
  return ToError(At(state->target, status));
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate<Forward>, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kInstantiateLhsGradient, Instantiate<LhsGradient>, InstantiateBinding());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute<Forward>, ExecuteBinding<State<Forward>>(),
                       {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER(kExecuteLhsGradient, Execute<LhsGradient>,
                       ExecuteBinding<State<LhsGradient>>(), {ffi::Traits::kCmdBufferCompatible});

}  // namespace

Handlers GroupedMatmulMxFp4Handlers() {
  return LocalHandlers<State<Forward>>(Forward::kTarget, LoadMatmulKernels, kInstantiate, kExecute);
}

Handlers GroupedMatmulMxFp4LhsGradientHandlers() {
  return LocalHandlers<State<LhsGradient>>(LhsGradient::kTarget, LoadMatmulKernels,
                                           kInstantiateLhsGradient, kExecuteLhsGradient);
}

}  // namespace jax_ep
