// The family of 16-bit operands for sm_90a.
#include <algorithm>

#include "ffi/device/common/integers.h"
#include "ffi/device/common/limits.h"
#include "ffi/kernels/checks.h"
#include "ffi/kernels/matmul/sm90/kernels.h"
#include "ffi/kernels/matmul/sm90/make_tensor_map.h"
#include "ffi/kernels/matmul/sm90/swapped_choice.h"

namespace jax_ep {
namespace {

// `params` has its b_column_blocks.
Status MakeTensorMaps(const MatmulCall& call, const Sm90Kernel& kernel, const MatmulParams& params,
                      MatmulTensorMaps* maps) {
  const MatmulKind kind = call.kind;
  const ElementType type = call.type;
  const ElementType out_type = call.out_type;
  const bool is_rhs_gradient = kind == MatmulKind::kRhsGradient;
  const int64_t rows = params.groups.num_rows;
  const int64_t groups = params.groups.num_groups;
  const int64_t columns = params.shape_n;
  const int64_t b_rows =
      HasTransposedB(kind) ? columns : params.shape_k;  // rows of one group's matrix
  const auto prefixes = [rows](const void* base, ElementType element, int64_t row_stride) {
    return MappedTensor::Prefixes(base, element, row_stride, row_stride, rows);
  };
  const MatmulOperand& a = params.a;
  const MatmulOperand& b = params.b;
  const MappedTensor mapped_b =
      is_rhs_gradient ? prefixes(b.data, type, b.row_stride)
                      : MappedTensor::Stack(b.data, type, b.row_stride, b_rows, groups);
  Status status =
      MakeTensorMap(prefixes(a.data, type, a.row_stride), {kernel.a_box_rows}, &maps->a);
  if (!status.ok()) return status;
  status = MakeTensorMap(mapped_b, {kernel.b_box_rows, params.b_column_blocks}, &maps->b);
  if (!status.ok()) return status;
  if (kernel.a_narrow_box_rows > 0) {
    status = MakeTensorMap(prefixes(a.data, type, a.row_stride), {kernel.a_narrow_box_rows},
                           &maps->a_narrow);
    if (!status.ok()) return status;
    status = MakeTensorMap(mapped_b, {.rows = kernel.b_narrow_box_rows, .is_narrow = true},
                           &maps->b_narrow);
    if (!status.ok()) return status;
  }
  status = MakeTensorMap(
      is_rhs_gradient ? MappedTensor::Stack(params.out, out_type, columns, params.shape_m, groups)
                      : prefixes(params.out, out_type, columns),
      kernel.float32_box_rows > 0 && out_type == kF32
          ? BoxShape{.rows = kernel.float32_box_rows, .columns = kernel.float32_box_columns}
          : BoxShape{kSm90OutBoxRows},
      &maps->out);
  if (!status.ok() || kind != MatmulKind::kActivation) return status;
  return MapPreActivation(params, type, maps);
}

// Chooses among tiles, and in params how they are ordered.
Status ChooseTiles(const MatmulCall& call, const Sm90Kernel& kernel, MatmulParams* params,
                   MatmulKernel* chosen) {
  const SwappedCall swapped = {
      .num_groups = params->groups.num_groups,
      .num_rows = params->groups.num_rows,
      .tiles_n = CeilDivide(int64_t{params->shape_n}, params->out_tile_n),
      .clusters = std::max<int64_t>(call.num_sms / chosen->cluster_blocks, 1)};
  params->halves_columns = kernel.has_half_tiles && swapped.HasFewTiles();
  params->halves_rows = swapped.HasFewTiles();
  if (kernel.wide_address != nullptr && call.out_type != kF32) {
    int bus_bits = 0;
    if (Status status = FindMemoryBusBits(&bus_bits); !status.ok()) return status;
    if (swapped.TakesWidePairs(bus_bits)) chosen->address = kernel.wide_address;
  }
  params->has_few_pairs = kernel.a_narrow_box_rows > 0 &&
                          swapped.HasFewPairs(MaxTiles(call.kind, *chosen, *params),
                                              std::min<int64_t>(call.num_sms, kMaxItems));
  return {};
}

class Sm90 final : public MatmulFamily {
  bool RunsOn(ComputeCapability device) const override { return device == kSm90; }

  std::vector<MatmulKernel> Kernels() const override {
    std::vector<MatmulKernel> kernels;
    for (MatmulKind kind :
         {MatmulKind::kForward, MatmulKind::kForwardTransposed, MatmulKind::kRhsGradient,
          MatmulKind::kActivation, MatmulKind::kActivationGradient}) {
      for (bool is_bfloat16 : {false, true}) {
        const Sm90Kernel kernel = Sm90MatmulKernel(is_bfloat16, kind);
        kernels.push_back(kernel.kernel);
        kernels.push_back(kernel.kernel);
        kernels.back().address = kernel.wide_address;
      }
    }
    return kernels;
  }

  // The requirements of TMA, of vector loads and stores in the epilogues, and a result that is not
  // empty or all zeros.
  bool Supports(const MatmulCall& call) const override {
    constexpr int64_t kMaxColumns = kMaxItems / 2;  // gated pre-activations have twice as many
    const MatmulParams& params = call.params;
    const EpilogueParams& epilogue = params.epilogue;
    return !IsQuantized(call) && call.type != kF32 && IsCopyable(params.a) &&
           IsCopyable(params.b) && params.shape_n % 8 == 0 && params.shape_n <= kMaxColumns &&
           IsAligned(params.out, 16) && IsAligned(epilogue.pre_activation, 16) &&
           IsAligned(epilogue.pre_activation_gradient, 16) && IsAligned(epilogue.bias, 8) &&
           (call.kind == MatmulKind::kRhsGradient ? params.shape_m : params.shape_k) > 0 &&
           params.groups.num_groups > 0 && params.groups.num_rows > 0;
  }

  Status Plan(const MatmulCall& call, MatmulPlan* plan) const override {
    const Sm90Kernel kernel = Sm90MatmulKernel(call.type == kBF16, call.kind);
    MatmulParams params = call.params;
    params.b_column_blocks =
        params.shape_n % kSm90ColumnBlock == 0 ? kernel.b_box_column_blocks : 1;
    MatmulTensorMaps maps;
    Status status = MakeTensorMaps(call, kernel, params, &maps);
    if (!status.ok()) return status;
    MatmulKernel chosen = kernel.kernel;
    params.out_tile_n = OutTileColumns(call, chosen);
    params.out_is_float32 = call.out_type == kF32;
    params.out_is_aligned = true;
    status = ChooseTiles(call, kernel, &params, &chosen);
    if (!status.ok()) return status;
    const int64_t tiles = MaxTiles(call.kind, chosen, params);
    if (tiles > kMaxItems) params.tile_counter = -1;  // a counter has 32 bits
    plan->emplace_back(chosen, tiles, call.num_sms, maps, params);
    return {};
  }
};

}  // namespace

const MatmulFamily& Sm90Matmuls() {
  static const Sm90 family;
  return family;
}

}  // namespace jax_ep
