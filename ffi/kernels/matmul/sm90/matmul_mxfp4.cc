// The family of bfloat16 rows and MXFP4 weights for sm_90a.
#include <algorithm>

#include "ffi/device/common/integers.h"
#include "ffi/device/common/limits.h"
#include "ffi/device/matmul/sm90/mxfp4_decode/scales.h"
#include "ffi/device/matmul/sm90/mxfp4_params.h"
#include "ffi/kernels/checks.h"
#include "ffi/kernels/matmul/sm90/kernels.h"
#include "ffi/kernels/matmul/sm90/make_tensor_map.h"
#include "ffi/kernels/matmul/sm90/swapped_choice.h"

namespace jax_ep {
namespace {

// Four values are one 16-bit element for TMA, which only moves them.
constexpr int kPacked = 4;

// 32 bytes of a column, a k-block; of one k, the 64 bytes of a tile's columns.
constexpr int kLineElements = 16;
constexpr int kTransposedLineElements = 32;

// Lanes read scales in words.
constexpr int kWordBytes = 4;

// Calls of up to so many rows per group decode. Where the rows lie is not known here: if all are in
// one group, the other kernel would take half as long.
constexpr int64_t kDecodeRows = 10;

// Boxes of several k-blocks of rows need whole ones.
constexpr int kDecodeK = 64;

// Up to so many, narrow tiles take less time.
constexpr int64_t kNarrowDecodeRows = 16;

Status CheckAddresses(const MatmulParams& params, const uint8_t* scales) {
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
  if (IsAligned(scales, kWordBytes)) return {};
  return FailedPrecondition("rhs_scales begin at an address that is no multiple of ", kWordBytes,
                            "; the MXFP4 kernel reads words. Copy the array first");
}

MappedTensor Prefixes(const MatmulParams& params, const void* base, ElementType type,
                      int64_t columns) {
  return MappedTensor::Prefixes(base, type, columns, columns, params.groups.num_rows);
}

MappedTensor Weights(const MatmulCall& call) {
  const MatmulParams& params = call.params;
  const int64_t columns = (HasGate(call) ? 2 : 1) * int64_t{params.shape_n};
  const auto stack = [&](int64_t values, int64_t lines) {
    return MappedTensor::Stack(params.b.data, kBF16, values / kPacked, lines,
                               params.groups.num_groups);
  };
  const bool is_lhs_gradient = call.kind == MatmulKind::kForward;
  return is_lhs_gradient ? stack(columns, params.shape_k) : stack(params.shape_k, columns);
}

Status MakeTensorMaps(const MatmulCall& call, const Sm90Kernel& kernel, MatmulTensorMaps* maps) {
  const MatmulParams& params = call.params;
  const bool is_lhs_gradient = call.kind == MatmulKind::kForward;
  const MappedTensor rows = Prefixes(params, params.a.data, kBF16, params.shape_k);
  const MappedTensor weights = Weights(call);
  const BoxShape weights_box = {
      .rows = kernel.b_box_rows,
      .columns = is_lhs_gradient ? kTransposedLineElements : kLineElements};
  const BoxShape narrow_weights_box = {.rows = kernel.b_narrow_box_rows,
                                       .columns = is_lhs_gradient ? kTransposedLineElements : 0,
                                       .is_narrow = true};
  // Row gradients store float32 results without TMA.
  const BoxShape out_box =
      call.out_type == kF32 && !is_lhs_gradient
          ? BoxShape{.rows = kernel.float32_box_rows, .columns = kernel.float32_box_columns}
          : BoxShape{kSm90OutBoxRows};
  const struct {
    MappedTensor tensor;
    BoxShape box;
    CUtensorMap* map;
  } all[] = {{rows, {kernel.a_box_rows}, &maps->a},
             {rows, {kernel.a_narrow_box_rows}, &maps->a_narrow},
             {weights, weights_box, &maps->b},
             {weights, narrow_weights_box, &maps->b_narrow},
             {Prefixes(params, params.out, call.out_type, params.shape_n), out_box, &maps->out}};
  for (const auto& [tensor, box, map] : all) {
    if (Status status = MakeTensorMap(tensor, box, map); !status.ok()) return status;
  }
  return MapPreActivation(params, kBF16, maps);
}

// All scales, in words.
int64_t ScaleWords(const MatmulParams& params) {
  return int64_t{params.groups.num_groups} * params.shape_n * params.shape_k /
         (kMxFp4Block * kWordBytes);
}

bool Decodes(const MatmulCall& call) {
  const MatmulParams& params = call.params;
  return call.kind == MatmulKind::kForwardTransposed &&
         params.groups.num_rows <= kDecodeRows * params.groups.num_groups &&
         params.shape_k % kDecodeK == 0 && ScaleWords(params) <= kMaxItems &&
         params.shape_k <= DecodeScales::kMaxPerColumn * kMxFp4Block &&
         CheckTmaAddress("rhs_scales", call.mxfp4->scales).ok();
}

// Plans the kernel for a few rows. `params` is complete but for the tiles.
Status PlanDecode(const MatmulCall& call, MatmulParams params, MatmulPlan* plan) {
  const bool is_narrow = params.groups.num_rows <= kNarrowDecodeRows;
  const Sm90Kernel kernel = Sm90MxFp4DecodeKernel(is_narrow);
  MatmulTensorMaps maps;
  const MappedTensor rows = Prefixes(params, params.a.data, kBF16, params.shape_k);
  const int64_t num_words = ScaleWords(params);
  const int64_t any_stride = kDecodeK;  // there is one line
  const MappedTensor words = {call.mxfp4->scales, kF32, num_words, 1, 1, any_stride, any_stride};
  DecodeScales scales;
  scales.k_blocks = params.shape_k / kMxFp4Block;
  const struct {
    MappedTensor tensor;
    BoxShape box;
    CUtensorMap* map;
  } all[] = {
      {rows, {kernel.a_box_rows, kernel.a_box_column_blocks}, &maps.a},
      {rows, {kernel.a_narrow_box_rows, kernel.a_box_column_blocks}, &maps.a_narrow},
      {Weights(call), {.rows = kernel.b_box_rows, .is_narrow = true}, &maps.b},
      {words, {.rows = 1, .columns = DecodeScales::kBoxWords, .is_narrow = true}, &scales.map}};
  for (const auto& [tensor, box, map] : all) {
    if (Status status = MakeTensorMap(tensor, box, map); !status.ok()) return status;
  }
  params.out_tile_n = kernel.kernel.tile_n;
  const int64_t tiles = MaxTiles(call.kind, kernel.kernel, params);
  plan->emplace_back(kernel.kernel, tiles, call.num_sms, maps, params, scales);
  return {};
}

class Sm90MxFp4 final : public MatmulFamily {
  bool RunsOn(ComputeCapability device) const override { return device == kSm90; }

  std::vector<MatmulKernel> Kernels() const override {
    return {Sm90MxFp4MatmulKernel().kernel, Sm90MxFp4DecodeKernel(false).kernel,
            Sm90MxFp4DecodeKernel(true).kernel, Sm90MxFp4ActivationKernel().kernel,
            Sm90MxFp4LhsGradientKernel().kernel};
  }

  bool Supports(const MatmulCall& call) const override { return call.mxfp4.has_value(); }

  Status Plan(const MatmulCall& call, MatmulPlan* plan) const override {
    MatmulParams params = call.params;
    Status status = CheckAddresses(params, call.mxfp4->scales);
    if (!status.ok() || params.groups.num_rows == 0 || params.groups.num_groups == 0) {
      return status;
    }
    params.out_is_float32 = call.out_type == kF32;
    params.out_is_aligned = true;
    if (Decodes(call)) return PlanDecode(call, params, plan);
    const bool is_activation = call.kind == MatmulKind::kActivation;
    const bool is_lhs_gradient = call.kind == MatmulKind::kForward;
    const Sm90Kernel kernel = is_activation     ? Sm90MxFp4ActivationKernel()
                              : is_lhs_gradient ? Sm90MxFp4LhsGradientKernel()
                                                : Sm90MxFp4MatmulKernel();
    MatmulTensorMaps maps;
    status = MakeTensorMaps(call, kernel, &maps);
    if (!status.ok()) return status;
    params.b_column_blocks = 1;
    params.out_tile_n = OutTileColumns(call, kernel.kernel);
    const int64_t tiles = MaxTiles(call.kind, kernel.kernel, params);
    const SwappedCall swapped = {
        .num_groups = params.groups.num_groups,
        .num_rows = params.groups.num_rows,
        .tiles_n = CeilDivide(int64_t{params.shape_n}, params.out_tile_n),
        .clusters = std::max<int64_t>(call.num_sms / kernel.kernel.cluster_blocks, 1)};
    params.has_few_pairs = swapped.HasFewPairs(tiles, std::min<int64_t>(call.num_sms, kMaxItems));
    if (tiles > kMaxItems) params.tile_counter = -1;  // a counter has 32 bits
    const MxFp4Scales scales = {.b = call.mxfp4->scales, .k_blocks = params.shape_k / kMxFp4Block};
    if (is_lhs_gradient) {
      plan->emplace_back(kernel.kernel, tiles, call.num_sms, maps, params, call.mxfp4->scales);
    } else if (is_activation) {
      plan->emplace_back(kernel.kernel, tiles, call.num_sms, maps, params, scales,
                         call.mxfp4->limits);
    } else {
      plan->emplace_back(kernel.kernel, tiles, call.num_sms, maps, params, scales);
    }
    return {};
  }
};

}  // namespace

const MatmulFamily& Sm90MxFp4Matmuls() {
  static const Sm90MxFp4 family;
  return family;
}

}  // namespace jax_ep
