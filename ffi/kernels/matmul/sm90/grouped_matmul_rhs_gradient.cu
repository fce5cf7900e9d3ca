// Weight gradients of grouped matmuls of 16-bit operands with TMA and wgmma, for sm_90a; other
// kinds are in grouped_matmul_swapped.cu.
//
// A persistent kernel in clusters of two blocks. A cluster computes a pair of tiles of 128 x 256 at
// a time, one per block. The two tiles share an operand, which is read once and multicast.
//
// Warp roles, in each block:
//
//   warp 0       producer: waits for an empty stage, loads one k-block of a and b by TMA
//   warp 1       scheduler, in block 0 only: finds the next pair of tiles for both blocks
//   warps 2, 3   idle
//   warps 4-11   two consumer warpgroups: wait for a full stage, multiply 64 x 256 each with wgmma,
//                release the stage; between MMAs they run the epilogue of the tile before
//
// Shared memory (pipeline.cuh): 4 stages of 48 KB; 4 KB of epilogue staging per consumer warp;
// barriers; two tile slots.
//
// Order of steps: initialize the barriers, cluster barrier, reallocate registers, run the roles
// until the scheduler sends an empty pair, cluster barrier.
#include "ffi/device/matmul/sm90/load/producer.cuh"
#include "ffi/device/matmul/sm90/mainloop/rhs_gradient_consumer.cuh"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/schedule/tile_scheduler.cuh"
#include "ffi/device/matmul/sm90/shapes.h"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/matmul/sm90/warp_roles.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/ptx/tma.cuh"
#include "ffi/kernels/matmul/sm90/kernels.h"

namespace jax_ep::sm90 {

static_assert(sizeof(MatmulTensorMaps) + sizeof(MatmulParams) <= 4096,
              "the limit of kernel parameters before CUDA 12.1");

template <typename T>
__global__ void __launch_bounds__(kThreads, 1)
    GroupedMatmulRhsGradientKernel(const __grid_constant__ MatmulTensorMaps maps,
                                   const __grid_constant__ MatmulParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr MatmulKind kKind = MatmulKind::kRhsGradient;
  const Pipeline pipeline(SharedAddress(DynamicSharedMemory()));
  RunWarpRoles<kProducerRegisters, kConsumerRegisters>(
      ProfiledKernel::kGroupedMatmulRhsGradient, pipeline,
      [&] {
        PrefetchTensorMap(&maps.a);
        PrefetchTensorMap(&maps.b);
        PrefetchTensorMap(&maps.out);
      },
      [&] { FindFirstTile<kKind>(params, pipeline); },
      [&](int block_rank) {
        RunProducer(pipeline, OperandLoader<kKind>{maps, block_rank, 0, params.b_column_blocks});
      },
      [&](int block_rank) { RunScheduler<kKind>(params, pipeline, block_rank); },
      [&] { RunRhsGradientConsumer<T>(maps, params, pipeline); });
#else
  __trap();  // code for compute capability 9.0 must be built for sm_90a
#endif
}

template __global__ void GroupedMatmulRhsGradientKernel<BFloat16>(
    const __grid_constant__ MatmulTensorMaps, const __grid_constant__ MatmulParams);
template __global__ void GroupedMatmulRhsGradientKernel<Float16>(
    const __grid_constant__ MatmulTensorMaps, const __grid_constant__ MatmulParams);

}  // namespace jax_ep::sm90

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

static_assert(kSm90OutBoxRows == sm90::kWarpM, "each consumer warp stores its own rows");
static_assert(kSm90ColumnBlock == sm90::kColumnBlock, "host and device agree");

Sm90Kernel Sm90RhsGradientKernel(bool is_bfloat16) {
  using namespace sm90;
  const auto kernel = is_bfloat16 ? GroupedMatmulRhsGradientKernel<BFloat16>
                                  : GroupedMatmulRhsGradientKernel<Float16>;
  return {.kernel = {.address = reinterpret_cast<const void*>(kernel),
                     .threads = kThreads,
                     .cluster_blocks = kClusterBlocks,
                     .shared_bytes = SharedLayout::kBytes,
                     .tile_m = kTileM,
                     .tile_n = kTileN},
          .a_box_rows = kTileK,
          .b_box_rows = kTileK,
          .b_box_column_blocks = kHalfN / kColumnBlock};
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
