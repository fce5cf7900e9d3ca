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

  MatmulProblem problem = {};
  problem.epilogue.activation = FunctionOf(config.activation);
  problem.epilogue.bias = buffers.bias;
  problem.epilogue.row_weights = buffers.row_weights;
  problem.epilogue.pre_activation = buffers.pre_activation;
  const bool is_gated = IsGated(config.activation);
  problem.left = Operand(buffers.lhs, sizes.lhs_type, sizes.contracted);
  problem.right = Operand(buffers.rhs, sizes.rhs_type, (is_gated ? 2 : 1) * sizes.columns);
  if (is_gated && sizes.columns * ElementBytes(sizes.rhs_type) % 16 != 0) {
    problem.right.is_aligned = false;  // that the columns of gate and up begin at
  }
  problem.out = buffers.out;
  problem.num_n = static_cast<int32_t>(sizes.columns);
  problem.num_k = static_cast<int32_t>(sizes.contracted);
  problem.rows = Rows(sizes, buffers.group_sizes, false);
  problem.tile_counter = tile_counter;
  return LaunchMatmul(MatmulKind::kActivation, sizes.lhs_type, sizes.lhs_type, config.num_sms,
                      problem, stream);
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

  MatmulProblem problem = {};
  problem.epilogue.activation = FunctionOf(config.activation);
  problem.epilogue.row_weights = buffers.row_weights;
  problem.epilogue.pre_activation = const_cast<void*>(buffers.pre_activation);  // is only read
  problem.epilogue.gradient = buffers.pre_activation_gradient;
  problem.epilogue.row_dots = buffers.row_dots;
  problem.left = Operand(buffers.out_gradient, sizes.lhs_type, sizes.contracted);
  problem.right = Operand(buffers.rhs, sizes.rhs_type, sizes.contracted);
  problem.out = buffers.hidden;
  problem.num_n = static_cast<int32_t>(sizes.columns);
  problem.num_k = static_cast<int32_t>(sizes.contracted);
  problem.rows = Rows(sizes, buffers.group_sizes, false);
  problem.tile_counter = tile_counter;
  return LaunchMatmul(MatmulKind::kActivationGradient, sizes.lhs_type, sizes.lhs_type,
                      config.num_sms, problem, stream);
}

}  // namespace jax_ep
