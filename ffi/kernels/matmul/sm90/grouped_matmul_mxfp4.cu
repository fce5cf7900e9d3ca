// Grouped matmul of bfloat16 rows and MXFP4 weights with TMA and wgmma, for sm_90a.
//
// The kernel of grouped_matmul_swapped.cu with other weights: columns of b are the rows of an MMA,
// which wgmma can take from registers. Consumers expand four bits to bfloat16 on the way from
// shared memory, once for all rows of a tile (mxfp4_consumer.cuh). Tiles, scheduler, pipeline and
// epilogues are the same.
#include "ffi/device/matmul/sm90/mxfp4_roles.cuh"
#include "ffi/kernels/matmul/sm90/kernels.h"

namespace jax_ep::sm90 {

__global__ void __launch_bounds__(kThreads, 1)
    GroupedMatmulMxFp4Kernel(const __grid_constant__ MatmulTensorMaps maps,
                             const __grid_constant__ MatmulParams params,
                             const __grid_constant__ MxFp4Scales scales) {
  RunMxFp4Roles<MatmulKind::kForwardTransposed>(maps, params, scales);
}

}  // namespace jax_ep::sm90

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

Sm90Kernel Sm90MxFp4MatmulKernel() {
  using namespace sm90;
  return {.kernel = {.address = reinterpret_cast<const void*>(GroupedMatmulMxFp4Kernel),
                     .threads = kThreads,
                     .cluster_blocks = kClusterBlocks,
                     .shared_bytes = SharedLayout::kBytes,
                     .tile_m = kSwappedRows,
                     .tile_n = kSwappedColumns},
          .a_box_rows = kSwappedBoxRows,
          .b_box_rows = kWarpgroupM,
          .a_narrow_box_rows = kSwappedNarrowBoxRows,
          .b_narrow_box_rows = kWarpgroupM,
          .float32_box_rows = kSwappedFloat32Rows,
          .float32_box_columns = kWarpM};
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
