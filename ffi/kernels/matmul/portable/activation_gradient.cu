// Gradient of the activation, as a kernel of its own, for sm_80 and newer.
//
// Runs after a kForwardTransposed matmul, which leaves the gradient of the intermediate activations
// in `out`. Each warp takes a row. For kColumnsPerDot columns at a time it replaces the gradient by
// the weighted intermediate activations, stores the gradient of the pre-activation, and reduces the
// row's dot product.
#include "ffi/device/matmul/portable/epilogue.cuh"
#include "ffi/kernels/matmul/portable/kernels.h"

namespace jax_ep::portable {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

}  // namespace

template <typename T>
__global__ void ActivationGradientKernel(const __grid_constant__ MatmulParams params) {
  constexpr uint32_t kAllLanes = 0xffffffffu;
  const EpilogueParams& epilogue = params.epilogue;
  const ActivationFunction& f = epilogue.activation;
  const RowGroups& groups = params.groups;
  const int lane = threadIdx.x % 32;
  const int64_t columns = params.shape_n;
  const int64_t pre_columns = f.is_gated ? 2 * columns : columns;
  const int64_t num_dots = CeilDivide(columns, kColumnsPerDot);

  // The end of the last group. The sum is below 2^62: fewer than 2^31 groups of fewer than 2^31
  // rows.
  int64_t end = 0;
  for (int32_t group = lane; group < groups.num_groups; group += 32) {
    end += max(groups.sizes[group], 0);
  }
  for (int distance = 16; distance > 0; distance /= 2) {
    end += __shfl_xor_sync(kAllLanes, end, distance);
  }
  end = min(end, int64_t{groups.num_rows});

  const int64_t num_warps = int64_t{gridDim.x} * kWarps;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < end; row += num_warps) {
    const float weight = epilogue.row_weights != nullptr ? epilogue.row_weights[row] : 1.0f;
    for (int64_t dot_index = 0; dot_index < num_dots; ++dot_index) {
      float dot = 0;
      for (int i = lane; i < kColumnsPerDot; i += 32) {
        const int64_t column = dot_index * kColumnsPerDot + i;
        if (column >= columns) break;
        const int64_t pre = row * pre_columns + column;
        const float d = LoadElement<T>(params.out, row * columns + column);
        const ActivationResult gate = Activate(f, LoadElement<T>(epilogue.pre_activation, pre));
        const float up = f.is_gated ? LoadElement<T>(epilogue.pre_activation, pre + columns) : 1.0f;
        const float activated = gate.value * up;
        dot += activated * d;
        StoreElement<T>(epilogue.pre_activation_gradient, pre, weight * d * up * gate.derivative);
        if (f.is_gated) {
          StoreElement<T>(epilogue.pre_activation_gradient, pre + columns, weight * d * gate.value);
        }
        StoreElement<T>(params.out, row * columns + column, weight * activated);
      }
      for (int distance = 16; distance > 0; distance /= 2) {
        dot += __shfl_xor_sync(kAllLanes, dot, distance);
      }
      if (lane == 0) epilogue.row_dots[row * num_dots + dot_index] = dot;
    }
  }
}

template __global__ void ActivationGradientKernel<BFloat16>(const __grid_constant__ MatmulParams);
template __global__ void ActivationGradientKernel<Float16>(const __grid_constant__ MatmulParams);
template __global__ void ActivationGradientKernel<Float32>(const __grid_constant__ MatmulParams);

}  // namespace jax_ep::portable

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

MatmulKernel PortableActivationGradientKernel(ElementType type) {
  using namespace portable;
  const auto kernel = type == kF32    ? ActivationGradientKernel<Float32>
                      : type == kBF16 ? ActivationGradientKernel<BFloat16>
                                      : ActivationGradientKernel<Float16>;
  return {.address = reinterpret_cast<const void*>(kernel),
          .threads = kThreads,
          .shared_bytes = 0,
          .tile_m = kWarps,
          .tile_n = 1};
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
