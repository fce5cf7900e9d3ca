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
  if (status.ok() && config.has_accumulator && sizes.rhs_type != kF32) {
    status = Unimplemented("rhs_gradient is not f32; the kernels accumulate in no other type");
  }
  return status;
}

Status LaunchGroupedMatmul(const GroupedMatmulConfig& config, const GroupedMatmulSizes& sizes,
                           const void* lhs, const void* rhs, const int32_t* group_sizes, void* out,
                           int32_t tile_counter, cudaStream_t stream) {
  Status status = CheckGroupedMatmulLaunch(config, sizes);
  if (!status.ok() || sizes.num_rows == 0 || sizes.columns == 0) return status;

  const int64_t rhs_row_stride = config.transpose_rhs ? sizes.contracted : sizes.columns;
  MatmulParams params = {};
  params.a = MakeOperand(lhs, sizes.lhs_type, sizes.contracted);
  params.b = MakeOperand(rhs, sizes.rhs_type, rhs_row_stride);
  params.out = out;
  params.shape_n = static_cast<int32_t>(sizes.columns);
  params.shape_k = static_cast<int32_t>(sizes.contracted);
  params.groups = MakeRowGroups(sizes, group_sizes, config.zero_tail);
  params.tile_counter = tile_counter;
  return LaunchMatmul(
      {.kind = config.transpose_rhs ? MatmulKind::kForwardTransposed : MatmulKind::kForward,
       .type = sizes.lhs_type,
       .out_type = sizes.result_type,
       .num_sms = config.num_sms,
       .params = params},
      stream);
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

  // Swapping the operands transposes the gradient.
  MatmulOperand a = MakeOperand(lhs, sizes.lhs_type, sizes.contracted);
  MatmulOperand b = MakeOperand(out_gradient, sizes.result_type, sizes.columns);
  if (config.transpose_rhs) std::swap(a, b);
  MatmulParams params = {};
  params.a = a;
  params.b = b;
  params.out = rhs_gradient;
  params.accumulates = config.has_accumulator;
  params.shape_m = static_cast<int32_t>(a.row_stride);
  params.shape_n = static_cast<int32_t>(b.row_stride);
  params.groups = MakeRowGroups(sizes, group_sizes, false);
  params.tile_counter = tile_counter;
  return LaunchMatmul({.kind = MatmulKind::kRhsGradient,
                       .type = sizes.lhs_type,
                       .out_type = sizes.rhs_type,
                       .num_sms = config.num_sms,
                       .params = params},
                      stream);
}

}  // namespace jax_ep
