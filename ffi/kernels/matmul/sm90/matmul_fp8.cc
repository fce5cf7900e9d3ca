// The family of 8-bit operands with scales for sm_90a.
#include "ffi/device/common/integers.h"
#include "ffi/device/common/limits.h"
#include "ffi/device/matmul/sm90/fp8_params.h"
#include "ffi/kernels/matmul/sm90/kernels.h"
#include "ffi/kernels/matmul/sm90/make_tensor_map.h"
#include "ffi/runtime/calls/config.h"

namespace jax_ep {
namespace {

// Two 8-bit values are one 16-bit element for TMA, which only moves them.
constexpr int kPacked = 2;

static_assert(kFp8Block == kScaleBlock, "host and device agree");

Status CheckAddresses(const MatmulParams& params) {
  const struct {
    const char* name;
    const void* address;
  } named[] = {{"lhs", params.a.data},
               {"rhs", params.b.data},
               {"out", params.out},
               {"pre_activation", params.epilogue.pre_activation}};
  for (const auto& [name, address] : named) {
    if (Status status = CheckTmaAddress(name, address); !status.ok()) return status;
  }
  return {};
}

// Returns the tensor map of a row-major matrix whose columns are `row_stride` apart.
Status MapRows(const void* base, ElementType type, int64_t columns, int64_t row_stride,
               const MatmulParams& params, int box_rows, CUtensorMap* map) {
  return MakeTensorMap(
      MappedTensor::Prefixes(base, type, columns, row_stride, params.groups.num_rows), {box_rows},
      map);
}

// Maps the operands, of which b has `columns`, and the results.
Status MakeTensorMaps(const MatmulCall& call, int64_t columns, const Sm90Kernel& kernel,
                      MatmulTensorMaps* maps) {
  const MatmulParams& params = call.params;
  const int64_t packed = params.shape_k / kPacked;
  Status status =
      MapRows(params.a.data, kBF16, packed, packed, params, kernel.a_box_rows, &maps->a);
  if (!status.ok()) return status;
  status = MakeTensorMap(
      MappedTensor::Stack(params.b.data, kBF16, packed, columns, params.groups.num_groups),
      {kernel.b_box_rows}, &maps->b);
  if (!status.ok()) return status;
  const int64_t n = params.shape_n;
  if (call.kind != MatmulKind::kActivation) {
    return MapRows(params.out, call.out_type, n, n, params, kSm90OutBoxRows, &maps->out);
  }
  status =
      MapRows(params.out, kBF16, n / kPacked, n / kPacked, params, kSm90OutBoxRows, &maps->out);
  return status.ok() ? MapPreActivation(params, kBF16, maps) : status;
}

// The same for a weight gradient: the operands are stacks of row blocks, and so is the result of
// matrices.
Status MapRhsGradient(const MatmulCall& call, const Sm90Kernel& kernel, MatmulTensorMaps* maps) {
  const MatmulParams& params = call.params;
  const int64_t row_blocks = params.groups.num_rows / kFp8Block;
  constexpr int64_t kColumns = kFp8Block / kPacked;
  Status status =
      MakeTensorMap(MappedTensor::Stack(params.a.data, kBF16, kColumns, params.shape_m, row_blocks),
                    {kernel.a_box_rows}, &maps->a);
  if (!status.ok()) return status;
  status =
      MakeTensorMap(MappedTensor::Stack(params.b.data, kBF16, kColumns, params.shape_n, row_blocks),
                    {kernel.b_box_rows}, &maps->b);
  if (!status.ok()) return status;
  return MakeTensorMap(MappedTensor::Stack(params.out, call.out_type, params.shape_n,
                                           params.shape_m, params.groups.num_groups),
                       {kSm90OutBoxRows}, &maps->out);
}

class Sm90Fp8 final : public MatmulFamily {
  bool RunsOn(ComputeCapability device) const override {
    static_assert(10 * kSm90.major + kSm90.minor == kEightBitCapability);
    return device == kSm90;
  }

  std::vector<MatmulKernel> Kernels() const override {
    std::vector<MatmulKernel> kernels = {Fp8ActivationKernel().kernel,
                                         Fp8RhsGradientKernel(false).kernel,
                                         Fp8RhsGradientKernel(true).kernel};
    for (Fp8Kind kind : {Fp8Kind::kBlock128, Fp8Kind::kRow, Fp8Kind::kRowE5M2}) {
      for (bool is_short : {false, true}) {
        kernels.push_back(Fp8MatmulKernel(kind, is_short).kernel);
      }
    }
    return kernels;
  }

  bool Supports(const MatmulCall& call) const override { return call.fp8.has_value(); }

  Status Plan(const MatmulCall& call, MatmulPlan* plan) const override {
    MatmulParams params = call.params;
    Status status = CheckAddresses(params);
    if (!status.ok() || params.groups.num_rows == 0 || params.groups.num_groups == 0) {
      return status;
    }
    if (call.kind == MatmulKind::kRhsGradient) return PlanRhsGradient(call, plan);
    const bool is_activation = call.kind == MatmulKind::kActivation;
    const Sm90Kernel kernel = is_activation
                                  ? Fp8ActivationKernel()
                                  : Fp8MatmulKernel(call.fp8->kind, params.shape_k <= kFp8ShortK);
    const int64_t columns = (is_activation ? 2 : 1) * int64_t{params.shape_n};  // belongs to b
    MatmulTensorMaps maps;
    status = MakeTensorMaps(call, columns, kernel, &maps);
    if (!status.ok()) return status;

    const Fp8Scales scales = {
        .a = call.fp8->a_scales,
        .b = call.fp8->b_scales,
        .k_blocks = CeilDivide(params.shape_k, kFp8Block),
        .n_blocks = static_cast<int32_t>(CeilDivide(columns, int64_t{kFp8Block})),
        .half_stride = is_activation ? params.shape_n / kFp8Block : 1,
        .out = call.fp8->out_scales,
        .out_is_power_of_two = call.fp8->power_of_two_scales};
    params.shape_k /= kPacked;
    params.b_column_blocks = 1;
    params.out_tile_n = OutTileColumns(call, kernel.kernel);
    params.out_is_float32 = call.out_type == kF32;
    const int64_t tiles = MaxTiles(call.kind, kernel.kernel, params);
    if (tiles > kMaxItems) params.tile_counter = -1;  // a counter has 32 bits
    plan->emplace_back(kernel.kernel, tiles, call.num_sms, maps, params, scales);
    return {};
  }

 private:
  static Status PlanRhsGradient(const MatmulCall& call, MatmulPlan* plan) {
    MatmulParams params = call.params;
    const int32_t row_blocks = params.groups.num_rows / kFp8Block;
    const bool is_short = row_blocks <= kFp8ShortK / kFp8Block * params.groups.num_groups;
    const Sm90Kernel kernel = Fp8RhsGradientKernel(is_short);
    MatmulTensorMaps maps;
    Status status = MapRhsGradient(call, kernel, &maps);
    if (!status.ok()) return status;
    const Fp8Scales scales = {.a = call.fp8->a_scales,
                              .b = call.fp8->b_scales,
                              .k_blocks = row_blocks,
                              .n_blocks = CeilDivide(params.shape_n, kFp8Block),
                              .half_stride = 1,
                              .a_stride = params.shape_m};
    params.b_column_blocks = 1;
    params.out_tile_n = OutTileColumns(call, kernel.kernel);
    params.out_is_float32 = call.out_type == kF32;
    const int64_t tiles = MaxTiles(call.kind, kernel.kernel, params);
    if (tiles > kMaxItems) params.tile_counter = -1;  // a counter has 32 bits
    plan->emplace_back(kernel.kernel, tiles, call.num_sms, maps, params, scales);
    return {};
  }
};

}  // namespace

const MatmulFamily& Sm90Fp8Matmuls() {
  static const Sm90Fp8 family;
  return family;
}

}  // namespace jax_ep
