// Row gradients of the grouped matmul of bfloat16 rows and MXFP4 weights with TMA and wgmma, for
// sm_90a.
//
// The kernel of grouped_matmul_mxfp4.cu for weights of which the contraction takes the columns: a
// scale belongs to one k and 32 columns of the result. ldmatrix transposes the weights
// (mxfp4_lhs_gradient_weights.cuh), and a warp of its own loads the scales
// (mxfp4_factor_loader.cuh).
#include "ffi/device/matmul/sm90/load/mxfp4_factor_loader.cuh"
#include "ffi/device/matmul/sm90/load/mxfp4_lhs_gradient_loader.cuh"
#include "ffi/device/matmul/sm90/load/producer.cuh"
#include "ffi/device/matmul/sm90/mainloop/mxfp4_lhs_gradient_consumer.cuh"
#include "ffi/device/matmul/sm90/schedule/tile_scheduler.cuh"
#include "ffi/device/matmul/sm90/warp_roles.cuh"
#include "ffi/kernels/matmul/sm90/kernels.h"

namespace jax_ep::sm90 {

__global__ void __launch_bounds__(kThreads, 1)
    GroupedMatmulMxFp4LhsGradientKernel(const __grid_constant__ MatmulTensorMaps maps,
                                        const __grid_constant__ MatmulParams params,
                                        const uint8_t* scales) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Raster = SwappedTilePairs;
  constexpr MatmulKind kKind = MatmulKind::kForward;
  const Pipeline pipeline(SharedAddress(DynamicSharedMemory()));
  RunWarpRoles<kProducerRegisters, kConsumerRegisters>(
      ProfiledKernel::kGroupedMatmulMxFp4LhsGradient, pipeline,
      [&] {
        PrefetchTensorMap(&maps.a);
        PrefetchTensorMap(&maps.b);
        PrefetchTensorMap(&maps.a_narrow);
        PrefetchTensorMap(&maps.b_narrow);
        PrefetchTensorMap(&maps.out);
      },
      [&] { FindFirstTile<kKind, Raster>(params, pipeline); },
      [&](int block_rank) { RunProducer(pipeline, MxFp4LhsGradientLoader{maps, block_rank}); },
      [&](int block_rank) { RunScheduler<kKind, Raster>(params, pipeline, block_rank); },
      [&] { MxFp4LhsGradientConsumer(maps, params, pipeline).Run(); },
      [&] { MxFp4FactorLoader(params, pipeline, scales).Run(); });
#else
  __trap();  // code for compute capability 9.0 must be built for sm_90a
#endif
}

}  // namespace jax_ep::sm90

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

Sm90Kernel Sm90MxFp4LhsGradientKernel() {
  using namespace sm90;
  return {.kernel = {.address = reinterpret_cast<const void*>(GroupedMatmulMxFp4LhsGradientKernel),
                     .threads = kThreads,
                     .cluster_blocks = kClusterBlocks,
                     .shared_bytes = SharedLayout::kBytes,
                     .tile_m = kSwappedRows,
                     .tile_n = kSwappedColumns},
          .a_box_rows = kSwappedBoxRows,
          .b_box_rows = kTileK,
          .a_narrow_box_rows = kSwappedNarrowBoxRows,
          .b_narrow_box_rows = kTileK};
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
