// Grouped matmul of 8-bit operands with TMA and wgmma, for sm_90a.
//
// The kernel of grouped_matmul_rhs_gradient.cu with other consumers. Producer, scheduler and
// pipeline take two 8-bit values for one 16-bit element, and b as [n, k]: 8-bit wgmma reads K-major
// operands only. The consumers multiply by 8-bit wgmma and promote the products of every k-block to
// float32 sums (fp8_consumer.cuh).
#include "ffi/device/matmul/sm90/epilogue/fp8_activation.cuh"
#include "ffi/device/matmul/sm90/epilogue/fp8_store.cuh"
#include "ffi/device/matmul/sm90/fp8_roles.cuh"
#include "ffi/kernels/matmul/sm90/kernels.h"

namespace jax_ep::sm90 {

// `up_offset`: rows of b from gate to up, or 0.
template <typename A, typename B, typename Scales, typename Epilogue>
__device__ void RunFp8Matmul(const MatmulTensorMaps& maps, const MatmulParams& params,
                             const Fp8Scales& scales, int up_offset) {
  constexpr MatmulKind kKind = MatmulKind::kForwardTransposed;
  RunFp8Roles<kKind, OperandLoader<kKind, true>, A, B, Scales, Epilogue>(maps, params, scales,
                                                                         up_offset);
}

// `kIsShort`: the tiles have few k-blocks.
template <typename A, typename B, typename Scales, bool kIsShort>
__global__ void __launch_bounds__(kThreads, 1)
    GroupedMatmulFp8Kernel(const __grid_constant__ MatmulTensorMaps maps,
                           const __grid_constant__ MatmulParams params,
                           const __grid_constant__ Fp8Scales scales) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  RunFp8Matmul<A, B, Scales, Fp8Epilogue<Scales, kIsShort>>(maps, params, scales, 0);
#else
  __trap();  // code for compute capability 9.0 must be built for sm_90a
#endif
}

__global__ void __launch_bounds__(kThreads, 1)
    GroupedMatmulFp8ActivationKernel(const __grid_constant__ MatmulTensorMaps maps,
                                     const __grid_constant__ MatmulParams params,
                                     const __grid_constant__ Fp8Scales scales) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  RunFp8Matmul<Float8E4M3, Float8E4M3, BlockScales, Fp8ActivationEpilogue>(maps, params, scales,
                                                                           params.shape_n);
#else
  __trap();  // code for compute capability 9.0 must be built for sm_90a
#endif
}

#define JAX_EP_INSTANTIATE(A, B, SCALES, IS_SHORT)                                    \
  template __global__ void GroupedMatmulFp8Kernel<A, B, SCALES, IS_SHORT>(            \
      const __grid_constant__ MatmulTensorMaps, const __grid_constant__ MatmulParams, \
      const __grid_constant__ Fp8Scales);
JAX_EP_INSTANTIATE(Float8E4M3, Float8E4M3, BlockScales, false)
JAX_EP_INSTANTIATE(Float8E4M3, Float8E4M3, BlockScales, true)
JAX_EP_INSTANTIATE(Float8E4M3, Float8E4M3, RowScales, false)
JAX_EP_INSTANTIATE(Float8E4M3, Float8E4M3, RowScales, true)
JAX_EP_INSTANTIATE(Float8E5M2, Float8E4M3, RowScales, false)
JAX_EP_INSTANTIATE(Float8E5M2, Float8E4M3, RowScales, true)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::sm90

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

namespace {

Sm90Kernel WithShapes(const void* address) {
  using namespace sm90;
  return {.kernel = {.address = address,
                     .threads = kThreads,
                     .cluster_blocks = kClusterBlocks,
                     .shared_bytes = SharedLayout::kBytes,
                     .tile_m = kTileM,
                     .tile_n = kTileN},
          .a_box_rows = kWarpgroupM,
          .b_box_rows = kHalfN};
}

template <bool kIsShort>
const void* Fp8KernelAddress(Fp8Kind kind) {
  using namespace sm90;
  switch (kind) {
    case Fp8Kind::kBlock128:
      return reinterpret_cast<const void*>(
          GroupedMatmulFp8Kernel<Float8E4M3, Float8E4M3, BlockScales, kIsShort>);
    case Fp8Kind::kRow:
      return reinterpret_cast<const void*>(
          GroupedMatmulFp8Kernel<Float8E4M3, Float8E4M3, RowScales, kIsShort>);
    case Fp8Kind::kRowE5M2:
      return reinterpret_cast<const void*>(
          GroupedMatmulFp8Kernel<Float8E5M2, Float8E4M3, RowScales, kIsShort>);
  }
  return nullptr;
}

}  // namespace

Sm90Kernel Fp8MatmulKernel(Fp8Kind kind, bool is_short) {
  return WithShapes(is_short ? Fp8KernelAddress<true>(kind) : Fp8KernelAddress<false>(kind));
}

Sm90Kernel Fp8ActivationKernel() {
  return WithShapes(reinterpret_cast<const void*>(sm90::GroupedMatmulFp8ActivationKernel));
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
