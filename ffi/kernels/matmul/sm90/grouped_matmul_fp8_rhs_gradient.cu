// Weight gradients of grouped matmuls of 8-bit operands with TMA and wgmma, for sm_90a.
//
// The kernel of grouped_matmul_fp8.cu with the tiles of grouped_matmul_rhs_gradient.cu. Both
// operands are transposed in row blocks (fp8_params.h), since 8-bit wgmma reads K-major operands
// only. A row block is a k-block, whose products the consumers promote to float32 sums.
#include "ffi/device/matmul/sm90/epilogue/fp8_store.cuh"
#include "ffi/device/matmul/sm90/epilogue/row_block_scales.cuh"
#include "ffi/device/matmul/sm90/fp8_roles.cuh"
#include "ffi/kernels/matmul/sm90/kernels.h"

namespace jax_ep::sm90 {

static_assert(kFp8Block == kSwizzleBytes, "a row block is one k-block");
static_assert(kTileK <= kFp8Block, "a tile of zeros has one k-block");
static_assert(kTileM == kFp8Block && kHalfN == kFp8Block, "a half of b has one scale per k-block");

// `kIsShort`: the tiles have few k-blocks.
template <bool kIsShort>
__global__ void __launch_bounds__(kThreads, 1)
    GroupedMatmulFp8RhsGradientKernel(const __grid_constant__ MatmulTensorMaps maps,
                                      const __grid_constant__ MatmulParams params,
                                      const __grid_constant__ Fp8Scales scales) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr MatmulKind kKind = MatmulKind::kRhsGradient;
  using Epilogue = Fp8Epilogue<RowBlockScales, kIsShort>;
  using Loader = OperandLoader<kKind, false, true>;
  RunFp8Roles<kKind, Loader, Float8E4M3, Float8E4M3, RowBlockScales, Epilogue>(maps, params, scales,
                                                                               0);
#else
  __trap();  // code for compute capability 9.0 must be built for sm_90a
#endif
}

template __global__ void GroupedMatmulFp8RhsGradientKernel<false>(
    const __grid_constant__ MatmulTensorMaps, const __grid_constant__ MatmulParams,
    const __grid_constant__ Fp8Scales);
template __global__ void GroupedMatmulFp8RhsGradientKernel<true>(
    const __grid_constant__ MatmulTensorMaps, const __grid_constant__ MatmulParams,
    const __grid_constant__ Fp8Scales);

}  // namespace jax_ep::sm90

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

Sm90Kernel Fp8RhsGradientKernel(bool is_short) {
  using namespace sm90;
  const auto kernel =
      is_short ? GroupedMatmulFp8RhsGradientKernel<true> : GroupedMatmulFp8RhsGradientKernel<false>;
  return {.kernel = {.address = reinterpret_cast<const void*>(kernel),
                     .threads = kThreads,
                     .cluster_blocks = kClusterBlocks,
                     .shared_bytes = SharedLayout::kBytes,
                     .tile_m = kTileM,
                     .tile_n = kTileN},
          .a_box_rows = kWarpgroupM,
          .b_box_rows = kHalfN};
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
