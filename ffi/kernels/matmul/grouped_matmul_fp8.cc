#include "ffi/kernels/matmul/grouped_matmul_fp8.h"

#include "ffi/device/matmul/sm90/fp8_params.h"
#include "ffi/kernels/matmul/launch.h"
#include "ffi/kernels/matmul/sm90/make_tensor_map.h"
#include "ffi/runtime/config.h"
#include "ffi/runtime/device_cuda.h"

namespace jax_ep {
namespace {

// Two 8-bit values are one 16-bit element for TMA, which only moves them.
constexpr int kPacked = 2;

constexpr int kTmaAlignment = 16;  // bytes

static_assert(kFp8Block == kScaleBlock, "host and device agree");

// Returns an error if the device or the addresses are not what the kernels require.
Status CheckDeviceAndAddresses(const Fp8Matmul& call) {
  bool has_sm90a = false;
  if (Status status = IsComputeCapability(9, 0, &has_sm90a); !status.ok()) return status;
  if (!has_sm90a) {
    return FailedPrecondition(
        "8-bit operands need a GPU of compute capability 9.0; this one has another. Lower the "
        "program on a machine with this GPU, or use implementation=\"xla\"");
  }
  const struct {
    const char* name;
    const void* address;
  } named[] = {{"lhs", call.lhs}, {"rhs", call.rhs}, {"out", call.out}};
  for (const auto& [name, address] : named) {
    if (reinterpret_cast<uintptr_t>(address) % kTmaAlignment == 0) continue;
    return FailedPrecondition(name, " begins at an address that is no multiple of ", kTmaAlignment,
                              "; TMA needs that. Copy the array first");
  }
  return {};
}

Status MakeTensorMaps(const Fp8Matmul& call, const GroupedMatmulSizes& sizes,
                      const MatmulKernel& kernel, MatmulTensorMaps* maps) {
  const int64_t columns = sizes.contracted / kPacked;
  Status status =
      MakeTensorMap(MappedTensor::Prefixes(call.lhs, kBF16, columns, columns, sizes.num_rows),
                    {kernel.a_box_rows}, &maps->a);
  if (!status.ok()) return status;
  status =
      MakeTensorMap(MappedTensor::Stack(call.rhs, kBF16, columns, sizes.columns, sizes.num_groups),
                    {kernel.b_box_rows}, &maps->b);
  if (!status.ok()) return status;
  return MakeTensorMap(MappedTensor::Prefixes(call.out, sizes.result_type, sizes.columns,
                                              sizes.columns, sizes.num_rows),
                       {kSm90OutBoxRows}, &maps->out);
}

}  // namespace

Status CheckGroupedMatmulFp8Launch(int64_t num_sms, const GroupedMatmulSizes& sizes) {
  GroupedMatmulSizes as_bfloat16 = sizes;
  as_bfloat16.lhs_type = kBF16;
  Status status = CheckMatmulLaunch(num_sms, as_bfloat16);
  if (status.ok()) status = CheckMatmulType("out", sizes.result_type, kBF16);
  if (!status.ok()) return status;
  const struct {
    const char* name;
    int64_t value;
    int64_t multiple;
  } named[] = {{"K", sizes.contracted, 16}, {"N", sizes.columns, 8}};
  for (const auto& [name, value, multiple] : named) {
    if (value % multiple == 0 && value > 0) continue;
    return Unimplemented(name, " is ", value, "; the FP8 kernels take positive multiples of ",
                         multiple);
  }
  return {};
}

Status LaunchGroupedMatmulFp8(const Fp8Matmul& call, const GroupedMatmulSizes& sizes,
                              int32_t tile_counter, cudaStream_t stream) {
  Status status = CheckGroupedMatmulFp8Launch(call.num_sms, sizes);
  if (status.ok()) status = CheckDeviceAndAddresses(call);
  if (!status.ok() || sizes.num_rows == 0 || sizes.num_groups == 0) return status;

  const MatmulKernel kernel = Fp8MatmulKernel(call.kind);
  MatmulTensorMaps maps;
  status = MakeTensorMaps(call, sizes, kernel, &maps);
  if (!status.ok()) return status;
  MatmulParams params = {};
  params.out = call.out;
  params.out_is_float32 = sizes.result_type == kF32;
  params.shape_n = static_cast<int32_t>(sizes.columns);
  params.shape_k = static_cast<int32_t>(sizes.contracted / kPacked);
  params.out_tile_n = kernel.tile_n;
  params.b_column_blocks = 1;
  params.groups = MakeRowGroups(sizes, call.group_sizes, call.zero_tail);
  Fp8Scales scales = {
      .a = call.lhs_scales,
      .b = call.rhs_scales,
      .k_blocks = static_cast<int32_t>(CeilDivide(sizes.contracted, int64_t{kFp8Block})),
      .n_blocks = static_cast<int32_t>(CeilDivide(sizes.columns, int64_t{kFp8Block}))};
  const int64_t tiles = MaxTiles(MatmulKind::kForwardTransposed, kernel, params);
  params.tile_counter = tiles > kMaxItems ? -1 : tile_counter;  // a counter has 32 bits
  void* arguments[] = {&maps, &params, &scales};
  return LaunchPersistentKernel(kernel, tiles, call.num_sms, arguments, stream);
}

}  // namespace jax_ep
