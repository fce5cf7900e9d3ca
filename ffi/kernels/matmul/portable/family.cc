#include "ffi/device/common/limits.h"
#include "ffi/kernels/checks.h"
#include "ffi/kernels/matmul/portable/kernels.h"

namespace jax_ep {
namespace {

MatmulKernel ChooseKernel(MatmulKind kind, const MatmulCall& call) {
  if (kind == MatmulKind::kActivationGradient) return PortableActivationGradientKernel(call.type);
  if (call.type == kF32) return PortableFloat32MatmulKernel(kind);
  return Portable16BitMatmulKernel(call.type == kBF16, kind,
                                   IsCopyable(call.params.a) && IsCopyable(call.params.b));
}

MatmulLaunch PlanLaunch(MatmulKind kind, const MatmulCall& call) {
  const MatmulKernel kernel = ChooseKernel(kind, call);
  MatmulParams params = call.params;
  params.out_tile_n = OutTileColumns(call, kernel);
  params.out_is_float32 = call.out_type == kF32;
  params.out_is_aligned =
      params.shape_n % kernel.store_elements == 0 &&
      IsAligned(params.out, kernel.store_elements * ElementBytes(call.out_type));
  const int64_t tiles = MaxTiles(kind, kernel, params);
  if (tiles > kMaxItems) params.tile_counter = -1;  // a counter has 32 bits
  return {kernel, tiles, call.num_sms, params};
}

class Portable final : public MatmulFamily {
  bool RunsOn(ComputeCapability /*device*/) const override { return true; }

  std::vector<MatmulKernel> Kernels() const override {
    std::vector<MatmulKernel> kernels;
    for (ElementType type : {kBF16, kF16, kF32}) {
      kernels.push_back(PortableActivationGradientKernel(type));
    }
    for (MatmulKind kind : {MatmulKind::kForward, MatmulKind::kForwardTransposed,
                            MatmulKind::kRhsGradient, MatmulKind::kActivation}) {
      kernels.push_back(PortableFloat32MatmulKernel(kind));
      for (bool is_bfloat16 : {false, true}) {
        for (bool use_cp_async : {false, true}) {
          kernels.push_back(Portable16BitMatmulKernel(is_bfloat16, kind, use_cp_async));
        }
      }
    }
    return kernels;
  }

  bool Supports(const MatmulCall& call) const override { return !IsQuantized(call); }

  Status Plan(const MatmulCall& call, MatmulPlan* plan) const override {
    if (call.kind == MatmulKind::kActivationGradient) {
      plan->push_back(PlanLaunch(MatmulKind::kForwardTransposed, call));
    }
    plan->push_back(PlanLaunch(call.kind, call));
    return {};
  }
};

}  // namespace

const MatmulFamily& PortableMatmuls() {
  static const Portable family;
  return family;
}

}  // namespace jax_ep
