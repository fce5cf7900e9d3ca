// The warp roles of the matmuls of bfloat16 rows and MXFP4 weights (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MXFP4_ROLES_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_MXFP4_ROLES_CUH_

#include "ffi/device/matmul/sm90/load/mxfp4_loader.cuh"
#include "ffi/device/matmul/sm90/load/producer.cuh"
#include "ffi/device/matmul/sm90/mainloop/mxfp4_consumer.cuh"
#include "ffi/device/matmul/sm90/mxfp4_params.h"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/schedule/swapped_tile_pairs.h"
#include "ffi/device/matmul/sm90/schedule/tile_scheduler.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/matmul/sm90/warp_roles.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90 {

// `limits`: see MxFp4Consumer.
template <MatmulKind kKind, typename... Limits>
__device__ __forceinline__ void RunMxFp4Roles(const MatmulTensorMaps& maps,
                                              const MatmulParams& params, const MxFp4Scales& scales,
                                              const Limits&... limits) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Raster = SwappedTilePairs;
  const Pipeline pipeline(SharedAddress(DynamicSharedMemory()));
  RunWarpRoles<kProducerRegisters, kConsumerRegisters>(
      ProfiledKernel::kGroupedMatmulMxFp4, pipeline,
      [&] {
        PrefetchTensorMap(&maps.a);
        PrefetchTensorMap(&maps.b);
        PrefetchTensorMap(&maps.a_narrow);
        PrefetchTensorMap(&maps.b_narrow);
        PrefetchTensorMap(&maps.out);
      },
      [&] { FindFirstTile<kKind, Raster>(params, pipeline); },
      [&](int block_rank) { RunProducer(pipeline, MxFp4Loader<kKind>{maps, params, block_rank}); },
      [&](int block_rank) { RunScheduler<kKind, Raster>(params, pipeline, block_rank); },
      [&] { MxFp4Consumer<kKind>(maps, params, scales, pipeline, limits...).Run(); });
#else
  __trap();  // code for compute capability 9.0 must be built for sm_90a
#endif
}

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MXFP4_ROLES_CUH_
