#include "ffi/kernels/matmul/grouped_matmul_activation.h"

#include "ffi/kernels/matmul/activation_function.h"
#include "ffi/kernels/matmul/launch.h"

namespace jax_ep {

Status CheckGroupedMatmulActivationLaunch(const GroupedMatmulActivationConfig& config,
                                          const GroupedMatmulSizes& sizes) {
  Status status = CheckMatmulLaunch(config.num_sms, sizes);
  if (status.ok()) status = CheckMatmulType("rhs", sizes.rhs_type, sizes.lhs_type);
  return status;
}

Status LaunchGroupedMatmulActivation(const GroupedMatmulActivationConfig& config,
                                     const GroupedMatmulSizes& sizes,
                                     const GroupedMatmulActivationBuffers& buffers,
                                     int32_t tile_counter, cudaStream_t stream) {
  Status status = CheckGroupedMatmulActivationLaunch(config, sizes);
  if (!status.ok() || sizes.num_rows == 0 || sizes.columns == 0) return status;

  MatmulParams params = {};
  params.epilogue.activation = MakeActivationFunction(config.activation);
  params.epilogue.bias = buffers.bias;
  params.epilogue.row_weights = buffers.row_weights;
  params.epilogue.pre_activation = buffers.pre_activation;
  const bool is_gated = IsGated(config.activation);
  params.a = MakeOperand(buffers.lhs, sizes.lhs_type, sizes.contracted);
  params.b = MakeOperand(buffers.rhs, sizes.rhs_type, (is_gated ? 2 : 1) * sizes.columns);
  if (is_gated && sizes.columns * ElementBytes(sizes.rhs_type) % 16 != 0) {
    params.b.is_aligned = false;  // the up columns begin at an unaligned address
  }
  params.out = buffers.out;
  params.shape_n = static_cast<int32_t>(sizes.columns);
  params.shape_k = static_cast<int32_t>(sizes.contracted);
  params.groups = MakeRowGroups(sizes, buffers.group_sizes, false);
  params.tile_counter = tile_counter;
  return LaunchMatmul({.kind = MatmulKind::kActivation,
                       .type = sizes.lhs_type,
                       .out_type = sizes.lhs_type,
                       .num_sms = config.num_sms,
                       .params = params},
                      stream);
}

Status LaunchGroupedMatmulActivationGradient(const GroupedMatmulActivationConfig& config,
                                             const GroupedMatmulSizes& sizes,
                                             const GroupedMatmulActivationGradientBuffers& buffers,
                                             int32_t tile_counter, cudaStream_t stream) {
  if (config.activation == Activation::kNone) {
    return InvalidArgument("activation is none; the gradient takes any other");
  }
  Status status = CheckGroupedMatmulActivationLaunch(config, sizes);
  if (!status.ok() || sizes.num_rows == 0 || sizes.columns == 0) return status;

  MatmulParams params = {};
  params.epilogue.activation = MakeActivationFunction(config.activation);
  params.epilogue.row_weights = buffers.row_weights;
  params.epilogue.pre_activation = const_cast<void*>(buffers.pre_activation);  // only read
  params.epilogue.pre_activation_gradient = buffers.pre_activation_gradient;
  params.epilogue.row_dots = buffers.row_dots;
  params.a = MakeOperand(buffers.out_gradient, sizes.lhs_type, sizes.contracted);
  params.b = MakeOperand(buffers.rhs, sizes.rhs_type, sizes.contracted);
  params.out = buffers.activations;
  params.shape_n = static_cast<int32_t>(sizes.columns);
  params.shape_k = static_cast<int32_t>(sizes.contracted);
  params.groups = MakeRowGroups(sizes, buffers.group_sizes, false);
  params.tile_counter = tile_counter;
  return LaunchMatmul({.kind = MatmulKind::kActivationGradient,
                       .type = sizes.lhs_type,
                       .out_type = sizes.lhs_type,
                       .num_sms = config.num_sms,
                       .params = params},
                      stream);
}

}  // namespace jax_ep
