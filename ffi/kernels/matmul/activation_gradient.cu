// The gradient of an activation, from the gradients of the hidden rows that a matmul has left where
// the hidden rows are to be.
#include "ffi/device/matmul/element_epilogue.cuh"
#include "ffi/kernels/matmul/kernels.h"

namespace jax_ep {
namespace {

constexpr int kThreads = 256;

}  // namespace

// A warp has a row, a lane every 32nd column.
template <typename T>
__global__ void ActivationGradientKernel(const __grid_constant__ MatmulProblem problem) {
  constexpr uint32_t kWarp = 0xffffffffu;
  const EpilogueParams& epilogue = problem.epilogue;
  const ActivationFunction& f = epilogue.activation;
  const GroupRows& rows = problem.rows;
  const int lane = threadIdx.x % 32;
  const int64_t columns = problem.num_n;
  const int64_t pitch = f.is_gated ? 2 * columns : columns;
  const int64_t num_blocks = CeilDivide(columns, kColumnsPerDot);

  // Sums stay below 2^62: there are less than 2^31 groups of less than 2^31 rows.
  int64_t end = 0;
  for (int32_t group = lane; group < rows.num_groups; group += 32) end += max(rows.sizes[group], 0);
  for (int distance = 16; distance > 0; distance /= 2) {
    end += __shfl_xor_sync(kWarp, end, distance);
  }
  end = min(end, int64_t{rows.num_rows});

  const int64_t warps = int64_t{gridDim.x} * (kThreads / 32);
  for (int64_t row = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32; row < end;
       row += warps) {
    const float weight = epilogue.row_weights != nullptr ? epilogue.row_weights[row] : 1.0f;
    for (int64_t block = 0; block < num_blocks; ++block) {
      float dot = 0;
      for (int i = lane; i < kColumnsPerDot; i += 32) {
        const int64_t n = block * kColumnsPerDot + i;
        if (n >= columns) break;
        const int64_t at = row * pitch + n;
        const float d = LoadElement<T>(problem.out, row * columns + n);
        const Activated a = Activate(f, LoadElement<T>(epilogue.pre_activation, at));
        const float up = f.is_gated ? LoadElement<T>(epilogue.pre_activation, at + columns) : 1.0f;
        const float hidden = a.value * up;
        dot += hidden * d;
        StoreElement<T>(epilogue.gradient, at, weight * d * up * a.slope);
        if (f.is_gated) StoreElement<T>(epilogue.gradient, at + columns, weight * d * a.value);
        StoreElement<T>(problem.out, row * columns + n, weight * hidden);
      }
      for (int distance = 16; distance > 0; distance /= 2) {
        dot += __shfl_xor_sync(kWarp, dot, distance);
      }
      if (lane == 0) epilogue.row_dots[row * num_blocks + block] = dot;
    }
  }
}

template __global__ void ActivationGradientKernel<BFloat16>(const __grid_constant__ MatmulProblem);
template __global__ void ActivationGradientKernel<Float16>(const __grid_constant__ MatmulProblem);
template __global__ void ActivationGradientKernel<Float32>(const __grid_constant__ MatmulProblem);

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

MatmulKernel ActivationGradientKernelOf(ElementType type) {
  const void* const address =
      type == kF32    ? reinterpret_cast<const void*>(ActivationGradientKernel<Float32>)
      : type == kBF16 ? reinterpret_cast<const void*>(ActivationGradientKernel<BFloat16>)
                      : reinterpret_cast<const void*>(ActivationGradientKernel<Float16>);
  return {.address = address,
          .threads = kThreads,
          .shared_bytes = 0,
          .tile_m = kThreads / 32,
          .tile_n = 1};
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
