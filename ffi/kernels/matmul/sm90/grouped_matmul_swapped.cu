// Grouped matmul of 16-bit operands with TMA, wgmma and swapped operands, for sm_90a: forward, also
// with transposed rhs, with an activation, and with an activation's gradient.
//
// The kernel of grouped_matmul_rhs_gradient.cu with other tiles. Each is the transpose of a tile of
// the result: columns of b are the rows of an MMA, and the group's rows are its columns, of which
// wgmma takes any multiple of 8 (swap A/B). So groups of any number of rows waste next to nothing;
// with 64 rows per MMA, groups of about 500 rows wasted 6 %.
//
// Producer, scheduler, pipeline and the order of steps are the same. A cluster computes a pair of
// tiles of up to 256 rows and 128 columns. A consumer warpgroup multiplies 64 of the columns. Wide
// tiles, of at most 128 rows and 256 columns, have rows as rows of an MMA, 64 per warpgroup.
#include "ffi/device/matmul/sm90/load/producer.cuh"
#include "ffi/device/matmul/sm90/load/swapped_loader.cuh"
#include "ffi/device/matmul/sm90/mainloop/swapped_consumer.cuh"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/schedule/swapped_tile_pairs.h"
#include "ffi/device/matmul/sm90/schedule/tile_scheduler.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/matmul/sm90/warp_roles.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/ptx/tma.cuh"
#include "ffi/kernels/matmul/sm90/kernels.h"

namespace jax_ep::sm90 {

template <typename T, MatmulKind kKind, typename Raster>
__global__ void __launch_bounds__(kThreads, 1)
    GroupedMatmulSwappedKernel(const __grid_constant__ MatmulTensorMaps maps,
                               const __grid_constant__ MatmulParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const Pipeline pipeline(SharedAddress(DynamicSharedMemory()));
  RunWarpRoles<kProducerRegisters, kConsumerRegisters>(
      ProfiledKernel::kGroupedMatmulSwapped, pipeline,
      [&] {
        PrefetchTensorMap(&maps.a);
        PrefetchTensorMap(&maps.b);
        PrefetchTensorMap(&maps.a_narrow);
        PrefetchTensorMap(&maps.b_narrow);
        PrefetchTensorMap(&maps.out);
      },
      [&] { FindFirstTile<kKind, Raster>(params, pipeline); },
      [&](int block_rank) {
        RunProducer(pipeline, SwappedOperandLoader<kKind, Raster>{maps, params, block_rank});
      },
      [&](int block_rank) { RunScheduler<kKind, Raster>(params, pipeline, block_rank); },
      [&] { SwappedConsumer<T, kKind, Raster>(maps, params, pipeline).Run(); });
#else
  __trap();  // code for compute capability 9.0 must be built for sm_90a
#endif
}

#define JAX_EP_INSTANTIATE(TYPE, KIND, RASTER)                                         \
  template __global__ void GroupedMatmulSwappedKernel<TYPE, MatmulKind::KIND, RASTER>( \
      const __grid_constant__ MatmulTensorMaps, const __grid_constant__ MatmulParams);
#define JAX_EP_INSTANTIATE_KINDS(TYPE)                               \
  JAX_EP_INSTANTIATE(TYPE, kForward, SwappedTilePairs)               \
  JAX_EP_INSTANTIATE(TYPE, kForward, SwappedWideTilePairs)           \
  JAX_EP_INSTANTIATE(TYPE, kForwardTransposed, SwappedTilePairs)     \
  JAX_EP_INSTANTIATE(TYPE, kForwardTransposed, SwappedWideTilePairs) \
  JAX_EP_INSTANTIATE(TYPE, kActivation, SwappedTilePairs)            \
  JAX_EP_INSTANTIATE(TYPE, kActivation, SwappedWideTilePairs)        \
  JAX_EP_INSTANTIATE(TYPE, kActivationGradient, SwappedTilePairs)
JAX_EP_INSTANTIATE_KINDS(BFloat16)
JAX_EP_INSTANTIATE_KINDS(Float16)
#undef JAX_EP_INSTANTIATE_KINDS
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::sm90

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {
namespace sm90 {
namespace {

template <typename T, MatmulKind kKind, typename Raster>
const void* Address() {
  return reinterpret_cast<const void*>(GroupedMatmulSwappedKernel<T, kKind, Raster>);
}

template <typename T, typename Raster>
const void* KernelAddress(MatmulKind kind) {
  switch (kind) {
    case MatmulKind::kForward:
      return Address<T, MatmulKind::kForward, Raster>();
    case MatmulKind::kForwardTransposed:
      return Address<T, MatmulKind::kForwardTransposed, Raster>();
    case MatmulKind::kActivation:
      return Address<T, MatmulKind::kActivation, Raster>();
    default:  // The activation gradient has no wide tiles: it would spill, and gain nothing.
      if constexpr (kHasWideTiles<Raster>) return nullptr;
      return Address<T, MatmulKind::kActivationGradient, SwappedTilePairs>();
  }
}

template <typename Raster>
const void* KernelAddress(bool is_bfloat16, MatmulKind kind) {
  return is_bfloat16 ? KernelAddress<BFloat16, Raster>(kind) : KernelAddress<Float16, Raster>(kind);
}

}  // namespace
}  // namespace sm90

Sm90Kernel Sm90SwappedMatmulKernel(bool is_bfloat16, MatmulKind kind) {
  using namespace sm90;
  return {.kernel = {.address = KernelAddress<SwappedTilePairs>(is_bfloat16, kind),
                     .threads = kThreads,
                     .cluster_blocks = kClusterBlocks,
                     .shared_bytes = SharedLayout::kBytes,
                     .tile_m = kSwappedRows,
                     .tile_n = kSwappedColumns},
          .wide_address = KernelAddress<SwappedWideTilePairs>(is_bfloat16, kind),
          .a_box_rows = kSwappedBoxRows,
          .b_box_rows = HasTransposedB(kind) ? kSwappedColumns : kTileK,
          .b_box_column_blocks = kind == MatmulKind::kForward ? kSwappedColumns / kColumnBlock : 1,
          .a_narrow_box_rows = kSwappedNarrowBoxRows,
          .b_narrow_box_rows = kTileK,
          .float32_box_rows = kSwappedFloat32Rows,
          .float32_box_columns = kWarpM,
          .has_half_tiles = kind == MatmulKind::kForward || kind == MatmulKind::kForwardTransposed};
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
