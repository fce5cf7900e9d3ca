#include "ffi/kernels/matmul/grouped_matmul_mxfp4.h"

#include <limits>

#include "ffi/kernels/matmul/activation_function.h"
#include "ffi/kernels/matmul/launch.h"

namespace jax_ep {
namespace {

MatmulCall MakeCall(MatmulKind kind, const MxFp4Matmul& call, const GroupedMatmulSizes& sizes,
                    bool zero_tail, int32_t tile_counter) {
  MatmulCall matmul = {.kind = kind,
                       .type = kBF16,
                       .out_type = sizes.result_type,
                       .num_sms = call.num_sms,
                       .mxfp4 = MxFp4Weights{.scales = call.rhs_scales}};
  MatmulParams& params = matmul.params;
  params.a = MakeOperand(call.lhs, kBF16, sizes.contracted);
  params.b.data = call.rhs;
  params.out = call.out;
  params.shape_n = static_cast<int32_t>(sizes.columns);
  params.shape_k = static_cast<int32_t>(sizes.contracted);
  params.groups = MakeRowGroups(sizes, call.group_sizes, zero_tail);
  params.tile_counter = tile_counter;
  return matmul;
}

// silu(x) is x * sigmoid(x), and that of a clamped SwiGLU x * sigmoid(alpha * x).
ActivationFunction MakeFunction(const MxFp4Activation& activation) {
  ActivationFunction f = MakeActivationFunction(activation.activation);
  if (activation.limit > 0) {
    f.linear *= activation.alpha;
    f.exp2_linear *= activation.alpha;
  }
  return f;
}

}  // namespace

Status CheckGroupedMatmulMxFp4Launch(int64_t num_sms, const GroupedMatmulSizes& sizes) {
  Status status = CheckMatmulLaunch(num_sms, sizes);
  if (status.ok()) status = CheckMatmulType("out", sizes.result_type, kBF16);
  if (!status.ok()) return status;
  return CheckMultiples("the MXFP4 kernel takes",
                        {{"K", sizes.contracted, 32}, {"N", sizes.columns, 8}});
}

Status LaunchGroupedMatmulMxFp4(const MxFp4Matmul& call, const GroupedMatmulSizes& sizes,
                                int32_t tile_counter, cudaStream_t stream) {
  Status status = CheckGroupedMatmulMxFp4Launch(call.num_sms, sizes);
  if (!status.ok()) return status;
  return LaunchMatmul(
      MakeCall(MatmulKind::kForwardTransposed, call, sizes, call.zero_tail, tile_counter), stream);
}

Status CheckGroupedMatmulMxFp4LhsGradientLaunch(int64_t num_sms, const GroupedMatmulSizes& sizes) {
  Status status = CheckMatmulLaunch(num_sms, sizes);
  if (status.ok()) status = CheckMatmulType("out", sizes.result_type, kBF16);
  if (!status.ok()) return status;
  return CheckMultiples("the MXFP4 kernel takes",
                        {{"K", sizes.columns, 32}, {"N", sizes.contracted, 8}});
}

Status LaunchGroupedMatmulMxFp4LhsGradient(const MxFp4Matmul& call, const GroupedMatmulSizes& sizes,
                                           int32_t tile_counter, cudaStream_t stream) {
  Status status = CheckGroupedMatmulMxFp4LhsGradientLaunch(call.num_sms, sizes);
  if (!status.ok()) return status;
  return LaunchMatmul(MakeCall(MatmulKind::kForward, call, sizes, call.zero_tail, tile_counter),
                      stream);
}

Status CheckGroupedMatmulMxFp4ActivationLaunch(const GroupedMatmulMxFp4ActivationConfig& config,
                                               const GroupedMatmulSizes& sizes) {
  const GroupedMatmulActivationConfig& epilogue = config.epilogue;
  Status status = CheckMatmulLaunch(epilogue.num_sms, sizes);
  if (!status.ok()) return status;
  if (epilogue.activation != Activation::kNone && !IsGated(epilogue.activation)) {
    return Unimplemented("the activation is not gated; the MXFP4 kernel takes gated ones or none");
  }
  return CheckMultiples("the MXFP4 kernel takes",
                        {{"K", sizes.contracted, 32}, {"F", sizes.columns, 8}});
}

Status LaunchGroupedMatmulMxFp4Activation(const MxFp4Matmul& call,
                                          const MxFp4Activation& activation,
                                          const GroupedMatmulSizes& sizes, int32_t tile_counter,
                                          cudaStream_t stream) {
  const GroupedMatmulMxFp4ActivationConfig config = {
      .epilogue = {.activation = activation.activation, .num_sms = call.num_sms}};
  Status status = CheckGroupedMatmulMxFp4ActivationLaunch(config, sizes);
  if (!status.ok()) return status;
  MatmulCall matmul = MakeCall(MatmulKind::kActivation, call, sizes, false, tile_counter);
  matmul.out_type = kBF16;
  EpilogueParams& epilogue = matmul.params.epilogue;
  epilogue.activation = MakeFunction(activation);
  epilogue.bias = activation.bias;
  epilogue.row_weights = activation.row_weights;
  epilogue.pre_activation = activation.pre_activation;
  matmul.mxfp4->limits =
      activation.limit > 0
          ? GateLimits{.limit = activation.limit, .up_offset = 1}
          : GateLimits{.limit = std::numeric_limits<float>::infinity(), .up_offset = -0.0f};
  return LaunchMatmul(matmul, stream);
}

}  // namespace jax_ep
