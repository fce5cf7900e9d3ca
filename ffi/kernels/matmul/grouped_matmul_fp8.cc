#include "ffi/kernels/matmul/grouped_matmul_fp8.h"

#include "ffi/device/matmul/sm90/fp8_params.h"
#include "ffi/kernels/matmul/activation_function.h"
#include "ffi/kernels/matmul/launch.h"
#include "ffi/kernels/matmul/sm90/make_tensor_map.h"
#include "ffi/runtime/calls/config.h"
#include "ffi/runtime/cuda/device_cuda.h"

namespace jax_ep {
namespace {

// Two 8-bit values are one 16-bit element for TMA, which only moves them.
constexpr int kPacked = 2;

constexpr int kTmaAlignment = 16;  // bytes

static_assert(kFp8Block == kScaleBlock, "host and device agree");

// Returns an error if the device or the addresses are not what the kernels require.
Status CheckDeviceAndAddresses(const Fp8Matmul& call, const void* pre_activation = nullptr) {
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
  } named[] = {
      {"lhs", call.lhs}, {"rhs", call.rhs}, {"out", call.out}, {"pre_activation", pre_activation}};
  for (const auto& [name, address] : named) {
    if (reinterpret_cast<uintptr_t>(address) % kTmaAlignment == 0) continue;
    return FailedPrecondition(name, " begins at an address that is no multiple of ", kTmaAlignment,
                              "; TMA needs that. Copy the array first");
  }
  return {};
}

// Returns the tensor map of a row-major matrix whose columns are `row_stride` apart.
Status MapRows(const void* base, ElementType type, int64_t columns, int64_t row_stride,
               const GroupedMatmulSizes& sizes, int box_rows, CUtensorMap* map) {
  return MakeTensorMap(MappedTensor::Prefixes(base, type, columns, row_stride, sizes.num_rows),
                       {box_rows}, map);
}

// Maps the operands. `columns` counts those of rhs.
Status MapOperands(const Fp8Matmul& call, const GroupedMatmulSizes& sizes, int64_t columns,
                   const MatmulKernel& kernel, MatmulTensorMaps* maps) {
  const int64_t packed = sizes.contracted / kPacked;
  Status status = MapRows(call.lhs, kBF16, packed, packed, sizes, kernel.a_box_rows, &maps->a);
  if (!status.ok()) return status;
  return MakeTensorMap(MappedTensor::Stack(call.rhs, kBF16, packed, columns, sizes.num_groups),
                       {kernel.b_box_rows}, &maps->b);
}

MatmulParams MakeParams(const Fp8Matmul& call, const GroupedMatmulSizes& sizes, bool zero_tail) {
  MatmulParams params = {};
  params.out = call.out;
  params.out_is_float32 = sizes.result_type == kF32;
  params.shape_n = static_cast<int32_t>(sizes.columns);
  params.shape_k = static_cast<int32_t>(sizes.contracted / kPacked);
  params.b_column_blocks = 1;
  params.groups = MakeRowGroups(sizes, call.group_sizes, zero_tail);
  return params;
}

Fp8Scales MakeScales(const Fp8Matmul& call, const GroupedMatmulSizes& sizes, int64_t columns) {
  return {.a = call.lhs_scales,
          .b = call.rhs_scales,
          .k_blocks = static_cast<int32_t>(CeilDivide(sizes.contracted, int64_t{kFp8Block})),
          .n_blocks = static_cast<int32_t>(CeilDivide(columns, int64_t{kFp8Block})),
          .half_stride = 1};
}

Status Launch(const MatmulKernel& kernel, int64_t num_sms, int32_t tile_counter,
              MatmulTensorMaps* maps, MatmulParams* params, Fp8Scales* scales,
              cudaStream_t stream) {
  const int64_t tiles = MaxTiles(MatmulKind::kForwardTransposed, kernel, *params);
  params->tile_counter = tiles > kMaxItems ? -1 : tile_counter;  // a counter has 32 bits
  void* arguments[] = {maps, params, scales};
  return LaunchPersistentKernel(kernel, tiles, num_sms, arguments, stream);
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

  const MatmulKernel kernel = Fp8MatmulKernel(call.kind, sizes.contracted <= kFp8ShortK);
  MatmulTensorMaps maps;
  status = MapOperands(call, sizes, sizes.columns, kernel, &maps);
  if (!status.ok()) return status;
  status = MapRows(call.out, sizes.result_type, sizes.columns, sizes.columns, sizes,
                   kSm90OutBoxRows, &maps.out);
  if (!status.ok()) return status;
  MatmulParams params = MakeParams(call, sizes, call.zero_tail);
  params.out_tile_n = kernel.tile_n;
  Fp8Scales scales = MakeScales(call, sizes, sizes.columns);
  return Launch(kernel, call.num_sms, tile_counter, &maps, &params, &scales, stream);
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
  if (sizes.columns % kFp8Block != 0 || sizes.columns > kMaxItems / 2) {
    return Unimplemented("F is ", sizes.columns, "; the FP8 kernel takes multiples of ", kFp8Block,
                         " up to ", kMaxItems / 2);
  }
  return {};
}

Status LaunchGroupedMatmulFp8Activation(const Fp8Matmul& call, const Fp8Activation& activation,
                                        const GroupedMatmulSizes& sizes, int32_t tile_counter,
                                        cudaStream_t stream) {
  Status status = CheckGroupedMatmulFp8ActivationLaunch(activation.activation, call.num_sms, sizes);
  if (status.ok()) status = CheckDeviceAndAddresses(call, activation.pre_activation);
  if (!status.ok() || sizes.num_rows == 0 || sizes.num_groups == 0) return status;

  const MatmulKernel kernel = Fp8ActivationKernel();
  const int64_t columns = sizes.columns;
  MatmulTensorMaps maps;
  status = MapOperands(call, sizes, 2 * columns, kernel, &maps);
  if (!status.ok()) return status;
  status = MapRows(call.out, kBF16, columns / kPacked, columns / kPacked, sizes, kSm90OutBoxRows,
                   &maps.out);
  for (int half = 0; status.ok() && activation.pre_activation != nullptr && half < 2; ++half) {
    const void* const first =
        static_cast<const char*>(activation.pre_activation) + half * columns * ElementBytes(kBF16);
    status = MapRows(first, kBF16, columns, 2 * columns, sizes, kSm90OutBoxRows,
                     &maps.pre_activation[half]);
  }
  if (!status.ok()) return status;
  MatmulParams params = MakeParams(call, sizes, false);
  params.out_tile_n = kernel.tile_n / 2;
  params.epilogue.activation = MakeActivationFunction(activation.activation);
  params.epilogue.row_weights = activation.row_weights;
  params.epilogue.pre_activation = activation.pre_activation;
  Fp8Scales scales = MakeScales(call, sizes, 2 * columns);
  scales.half_stride = static_cast<int32_t>(columns / kFp8Block);
  scales.out = activation.out_scales;
  scales.out_is_power_of_two = activation.power_of_two_scales;
  return Launch(kernel, call.num_sms, tile_counter, &maps, &params, &scales, stream);
}

}  // namespace jax_ep
