#include "ffi/kernels/matmul/grouped_matmul_fp8.h"

#include "ffi/kernels/matmul/activation_function.h"
#include "ffi/kernels/matmul/launch.h"

namespace jax_ep {
namespace {

MatmulCall MakeCall(MatmulKind kind, const Fp8Matmul& call, const GroupedMatmulSizes& sizes,
                    bool zero_tail, int32_t tile_counter) {
  MatmulParams params = {};
  params.a = MakeOperand(call.lhs, sizes.lhs_type, sizes.contracted);
  params.b = MakeOperand(call.rhs, sizes.rhs_type, sizes.contracted);
  params.out = call.out;
  params.shape_n = static_cast<int32_t>(sizes.columns);
  params.shape_k = static_cast<int32_t>(sizes.contracted);
  params.groups = MakeRowGroups(sizes, call.group_sizes, zero_tail);
  params.tile_counter = tile_counter;
  return {
      .kind = kind,
      .type = sizes.lhs_type,
      .out_type = sizes.result_type,
      .num_sms = call.num_sms,
      .fp8 =
          Fp8Operands{.kind = call.kind, .a_scales = call.lhs_scales, .b_scales = call.rhs_scales},
      .params = params};
}

}  // namespace

Status CheckGroupedMatmulFp8Launch(int64_t num_sms, const GroupedMatmulSizes& sizes) {
  GroupedMatmulSizes as_bfloat16 = sizes;
  as_bfloat16.lhs_type = kBF16;
  Status status = CheckMatmulLaunch(num_sms, as_bfloat16);
  if (status.ok()) status = CheckMatmulType("out", sizes.result_type, kBF16);
  if (!status.ok()) return status;
  return CheckMultiples("the FP8 kernels take",
                        {{"K", sizes.contracted, 16}, {"N", sizes.columns, 8}});
}

Status LaunchGroupedMatmulFp8(const Fp8Matmul& call, const GroupedMatmulSizes& sizes,
                              int32_t tile_counter, cudaStream_t stream) {
  Status status = CheckGroupedMatmulFp8Launch(call.num_sms, sizes);
  if (!status.ok()) return status;
  return LaunchMatmul(
      MakeCall(MatmulKind::kForwardTransposed, call, sizes, call.zero_tail, tile_counter), stream);
}

Status CheckGroupedMatmulFp8ActivationLaunch(Activation activation, int64_t num_sms,
                                             const GroupedMatmulSizes& sizes) {
  GroupedMatmulSizes as_bfloat16 = sizes;
  as_bfloat16.result_type = kBF16;
  Status status = CheckGroupedMatmulFp8Launch(num_sms, as_bfloat16);
  if (!status.ok()) return status;
  if (!IsGated(activation)) {
    return Unimplemented("the activation is not gated; the FP8 kernel takes gated ones");
  }
  if (sizes.columns % kScaleBlock != 0 || sizes.columns > kMaxItems / 2) {
    return Unimplemented("F is ", sizes.columns, "; the FP8 kernel takes multiples of ",
                         kScaleBlock, " up to ", kMaxItems / 2);
  }
  return {};
}

Status LaunchGroupedMatmulFp8Activation(const Fp8Matmul& call, const Fp8Activation& activation,
                                        const GroupedMatmulSizes& sizes, int32_t tile_counter,
                                        cudaStream_t stream) {
  Status status = CheckGroupedMatmulFp8ActivationLaunch(activation.activation, call.num_sms, sizes);
  if (!status.ok()) return status;
  MatmulCall matmul = MakeCall(MatmulKind::kActivation, call, sizes, false, tile_counter);
  EpilogueParams& epilogue = matmul.params.epilogue;
  epilogue.activation = MakeActivationFunction(activation.activation);
  epilogue.row_weights = activation.row_weights;
  epilogue.pre_activation = activation.pre_activation;
  matmul.fp8->out_scales = activation.out_scales;
  matmul.fp8->power_of_two_scales = activation.power_of_two_scales;
  return LaunchMatmul(matmul, stream);
}

}  // namespace jax_ep
