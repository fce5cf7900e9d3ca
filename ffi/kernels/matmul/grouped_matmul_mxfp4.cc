#include "ffi/kernels/matmul/grouped_matmul_mxfp4.h"

#include "ffi/kernels/matmul/launch.h"

namespace jax_ep {

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
  MatmulParams params = {};
  params.a = MakeOperand(call.lhs, kBF16, sizes.contracted);
  params.b.data = call.rhs;
  params.out = call.out;
  params.shape_n = static_cast<int32_t>(sizes.columns);
  params.shape_k = static_cast<int32_t>(sizes.contracted);
  params.groups = MakeRowGroups(sizes, call.group_sizes, call.zero_tail);
  params.tile_counter = tile_counter;
  return LaunchMatmul({.kind = MatmulKind::kForwardTransposed,
                       .type = kBF16,
                       .out_type = sizes.result_type,
                       .num_sms = call.num_sms,
                       .mxfp4 = MxFp4Weights{.scales = call.rhs_scales},
                       .params = params},
                      stream);
}

}  // namespace jax_ep
