// Grouped matmul of 16-bit operands with TMA, wgmma and swapped operands, for sm_90a: forward, also
// with transposed rhs, with an activation, and with an activation's gradient.
//
// The kernel of grouped_matmul_rhs_gradient.cu with other tiles. Each is the transpose of a tile of
// the result: columns of b are the rows of an MMA, and the group's rows are its columns, of which
// wgmma takes any multiple of 8 (swap A/B). So groups of any number of rows waste next to nothing;
// with 64 rows per MMA, groups of about 500 rows wasted 6 %.
//
// Producer, scheduler, pipeline and the order of steps are the same. A cluster computes a pair of
// tiles of up to 256 rows and 128 columns. A consumer warpgroup multiplies 64 of the columns.
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/producer.cuh"
#include "ffi/device/matmul/sm90/swapped_consumer.cuh"
#include "ffi/device/matmul/sm90/swapped_loader.cuh"
#include "ffi/device/matmul/sm90/swapped_tile_pairs.h"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/matmul/sm90/tile_scheduler.cuh"
#include "ffi/device/matmul/sm90/warp_roles.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/ptx/tma.cuh"
#include "ffi/kernels/matmul/kernels.h"

namespace jax_ep::sm90 {

template <typename T, MatmulKind kKind>
__global__ void __launch_bounds__(kThreads, 1)
    GroupedMatmulSwappedKernel(const __grid_constant__ MatmulTensorMaps maps,
                               const __grid_constant__ MatmulParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const Pipeline pipeline(SharedAddress(DynamicSharedMemory()));
  RunWarpRoles<kProducerRegisters, kConsumerRegisters>(
      pipeline,
      [&] {
        PrefetchTensorMap(&maps.a);
        PrefetchTensorMap(&maps.b);
        PrefetchTensorMap(&maps.a_narrow);
        PrefetchTensorMap(&maps.b_narrow);
        PrefetchTensorMap(&maps.out);
      },
      [&] { FindFirstTile<kKind, SwappedTilePairs>(params, pipeline); },
      [&](int block_rank) {
        RunProducer(pipeline, SwappedOperandLoader<kKind>{maps, params, block_rank});
      },
      [&](int block_rank) { RunScheduler<kKind, SwappedTilePairs>(params, pipeline, block_rank); },
      [&] { SwappedConsumer<T, kKind>(maps, params, pipeline).Run(); });
#else
  __trap();  // code for compute capability 9.0 must be built for sm_90a
#endif
}

#define JAX_EP_INSTANTIATE(TYPE, KIND)                                         \
  template __global__ void GroupedMatmulSwappedKernel<TYPE, MatmulKind::KIND>( \
      const __grid_constant__ MatmulTensorMaps, const __grid_constant__ MatmulParams);
JAX_EP_INSTANTIATE(BFloat16, kForward)
JAX_EP_INSTANTIATE(BFloat16, kForwardTransposed)
JAX_EP_INSTANTIATE(BFloat16, kActivation)
JAX_EP_INSTANTIATE(BFloat16, kActivationGradient)
JAX_EP_INSTANTIATE(Float16, kForward)
JAX_EP_INSTANTIATE(Float16, kForwardTransposed)
JAX_EP_INSTANTIATE(Float16, kActivation)
JAX_EP_INSTANTIATE(Float16, kActivationGradient)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::sm90

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {
namespace sm90 {
namespace {

template <typename T>
const void* KernelAddress(MatmulKind kind) {
  switch (kind) {
    case MatmulKind::kForward:
      return reinterpret_cast<const void*>(GroupedMatmulSwappedKernel<T, MatmulKind::kForward>);
    case MatmulKind::kForwardTransposed:
      return reinterpret_cast<const void*>(
          GroupedMatmulSwappedKernel<T, MatmulKind::kForwardTransposed>);
    case MatmulKind::kActivation:
      return reinterpret_cast<const void*>(GroupedMatmulSwappedKernel<T, MatmulKind::kActivation>);
    default:
      return reinterpret_cast<const void*>(
          GroupedMatmulSwappedKernel<T, MatmulKind::kActivationGradient>);
  }
}

}  // namespace
}  // namespace sm90

MatmulKernel Sm90SwappedMatmulKernel(bool is_bfloat16, MatmulKind kind) {
  using namespace sm90;
  return {.address = is_bfloat16 ? KernelAddress<BFloat16>(kind) : KernelAddress<Float16>(kind),
          .threads = kThreads,
          .cluster_blocks = kClusterBlocks,
          .shared_bytes = SharedLayout::kBytes,
          .tile_m = kSwappedRows,
          .tile_n = kSwappedColumns,
          .a_box_rows = kSwappedBoxRows,
          .b_box_rows = HasTransposedB(kind) ? kSwappedColumns : kTileK,
          .b_box_column_blocks = kind == MatmulKind::kForward ? kSwappedColumns / kColumnBlock : 1,
          .a_narrow_box_rows = kSwappedNarrowBoxRows,
          .narrow_rows = SwappedTilePairs::kNarrowRows,
          .b_narrow_box_rows = kTileK,
          .float32_box_rows = kSwappedFloat32Rows,
          .float32_box_columns = kWarpM,
          .has_half_tiles = kind == MatmulKind::kForward || kind == MatmulKind::kForwardTransposed};
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
