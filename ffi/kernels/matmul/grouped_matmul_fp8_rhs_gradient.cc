#include "ffi/kernels/matmul/grouped_matmul_fp8_rhs_gradient.h"

#include "ffi/device/common/limits.h"
#include "ffi/kernels/matmul/launch.h"

namespace jax_ep {

Status CheckGroupedMatmulFp8RhsGradientLaunch(const GroupedMatmulQuantizedRhsGradientConfig& config,
                                              const GroupedMatmulSizes& sizes) {
  GroupedMatmulSizes as_bfloat16 = sizes;
  as_bfloat16.lhs_type = kBF16;
  Status status = CheckMatmulLaunch(config.num_sms, as_bfloat16);
  if (status.ok()) status = CheckMatmulType("rhs_gradient", sizes.rhs_type, kBF16);
  if (!status.ok()) return status;
  if (config.has_accumulator && sizes.rhs_type != kF32) {
    return Unimplemented("rhs_gradient is not f32; the kernels accumulate in no other type");
  }
  // TMA stores rows of N elements that begin at multiples of 16 bytes.
  return CheckMultiples("the FP8 kernels take",
                        {{"M", sizes.num_rows, kScaleBlock}, {"N", sizes.columns, 8}});
}

Status LaunchGroupedMatmulFp8RhsGradient(const GroupedMatmulQuantizedRhsGradientConfig& config,
                                         const Fp8RhsGradient& call,
                                         const GroupedMatmulSizes& sizes, int32_t tile_counter,
                                         cudaStream_t stream) {
  Status status = CheckGroupedMatmulFp8RhsGradientLaunch(config, sizes);
  if (!status.ok() || sizes.num_groups == 0 || sizes.contracted == 0) return status;
  MatmulParams params = {};
  params.a = MakeOperand(call.a, kF8E4M3, kScaleBlock);
  params.b = MakeOperand(call.b, kF8E4M3, kScaleBlock);
  params.out = call.rhs_gradient;
  params.accumulates = config.has_accumulator;
  params.shape_m = static_cast<int32_t>(sizes.contracted);
  params.shape_n = static_cast<int32_t>(sizes.columns);
  params.groups = MakeRowGroups(sizes, call.group_sizes, false);
  params.tile_counter = tile_counter;
  return LaunchMatmul({.kind = MatmulKind::kRhsGradient,
                       .type = kF8E4M3,
                       .out_type = sizes.rhs_type,
                       .num_sms = config.num_sms,
                       .fp8 = Fp8Operands{.kind = Fp8Kind::kBlock128,
                                          .a_scales = call.a_scales,
                                          .b_scales = call.b_scales},
                       .params = params},
                      stream);
}

}  // namespace jax_ep
