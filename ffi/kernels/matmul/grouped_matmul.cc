#include "ffi/kernels/matmul/grouped_matmul.h"

#include <utility>

#include "ffi/kernels/matmul/launch.h"

namespace jax_ep {

Status CheckGroupedMatmulLaunch(const GroupedMatmulConfig& config,
                                const GroupedMatmulSizes& sizes) {
  Status status = CheckMatmulLaunch(config.num_sms, sizes);
  if (status.ok()) status = CheckMatmulType("rhs", sizes.rhs_type, sizes.lhs_type);
  if (status.ok()) status = CheckMatmulType("out", sizes.result_type, sizes.lhs_type);
  return status;
}

Status CheckGroupedMatmulRhsGradientLaunch(const GroupedMatmulConfig& config,
                                           const GroupedMatmulSizes& sizes) {
  Status status = CheckMatmulLaunch(config.num_sms, sizes);
  if (status.ok() && sizes.result_type != sizes.lhs_type) {
    status = Unimplemented("out_gradient is not of lhs's type; the kernels take no other");
  }
  if (status.ok()) status = CheckMatmulType("rhs_gradient", sizes.rhs_type, sizes.lhs_type);
  return status;
}

Status LaunchGroupedMatmul(const GroupedMatmulConfig& config, const GroupedMatmulSizes& sizes,
                           const void* lhs, const void* rhs, const int32_t* group_sizes, void* out,
                           int32_t tile_counter, cudaStream_t stream) {
  Status status = CheckGroupedMatmulLaunch(config, sizes);
  if (!status.ok() || sizes.num_rows == 0 || sizes.columns == 0) return status;

  const int64_t rhs_pitch = config.transpose_rhs ? sizes.contracted : sizes.columns;
  MatmulProblem problem = {};
  problem.left = Operand(lhs, sizes.lhs_type, sizes.contracted);
  problem.right = Operand(rhs, sizes.rhs_type, rhs_pitch);
  problem.out = out;
  problem.num_n = static_cast<int32_t>(sizes.columns);
  problem.num_k = static_cast<int32_t>(sizes.contracted);
  problem.rows = Rows(sizes, group_sizes, config.zero_tail);
  problem.tile_counter = tile_counter;
  return LaunchMatmul(config.transpose_rhs ? MatmulKind::kForwardTransposed : MatmulKind::kForward,
                      sizes.lhs_type, sizes.result_type, config.num_sms, problem, stream);
}

Status LaunchGroupedMatmulRhsGradient(const GroupedMatmulConfig& config,
                                      const GroupedMatmulSizes& sizes, const void* lhs,
                                      const void* out_gradient, const int32_t* group_sizes,
                                      void* rhs_gradient, int32_t tile_counter,
                                      cudaStream_t stream) {
  Status status = CheckGroupedMatmulRhsGradientLaunch(config, sizes);
  if (!status.ok() || sizes.num_groups == 0 || sizes.contracted == 0 || sizes.columns == 0) {
    return status;
  }

  // The transposed gradient is that of the operands in the other order.
  MatmulOperand left = Operand(lhs, sizes.lhs_type, sizes.contracted);
  MatmulOperand right = Operand(out_gradient, sizes.result_type, sizes.columns);
  if (config.transpose_rhs) std::swap(left, right);
  MatmulProblem problem = {};
  problem.left = left;
  problem.right = right;
  problem.out = rhs_gradient;
  problem.num_m = static_cast<int32_t>(left.pitch);
  problem.num_n = static_cast<int32_t>(right.pitch);
  problem.rows = Rows(sizes, group_sizes, false);
  problem.tile_counter = tile_counter;
  return LaunchMatmul(MatmulKind::kRhsGradient, sizes.lhs_type, sizes.rhs_type, config.num_sms,
                      problem, stream);
}

}  // namespace jax_ep
