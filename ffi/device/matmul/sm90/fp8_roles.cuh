// The warp roles of all FP8 matmuls (sm_90), which differ in tiles, loads and epilogues.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_FP8_ROLES_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_FP8_ROLES_CUH_

#include "ffi/device/matmul/sm90/load/producer.cuh"
#include "ffi/device/matmul/sm90/mainloop/fp8_consumer.cuh"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/schedule/tile_scheduler.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/matmul/sm90/warp_roles.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90 {

static_assert(sizeof(MatmulTensorMaps) + sizeof(MatmulParams) + sizeof(Fp8Scales) <= 4096,
              "the limit of kernel parameters before CUDA 12.1");

// `Loader` is an OperandLoader; `up_offset`: rows of b from gate to up, or 0.
template <MatmulKind kKind, typename Loader, typename A, typename B, typename Scales,
          typename Epilogue>
__device__ void RunFp8Roles(const MatmulTensorMaps& maps, const MatmulParams& params,
                            const Fp8Scales& scales, int up_offset) {
  constexpr int kRegisters = Epilogue::kConsumerRegisters;
  constexpr int kOfBlock = kThreads * kLaunchRegisters / kWarpgroupThreads;
  constexpr int kFewRegisters = (kOfBlock - kConsumerWarpgroups * kRegisters) / 8 * 8;
  static_assert(kFewRegisters >= 24, "setmaxnreg takes 24 to 256");
  const Pipeline pipeline(SharedAddress(DynamicSharedMemory()));
  RunWarpRoles<kFewRegisters, kRegisters>(
      kIsRhsGradient<kKind> ? ProfiledKernel::kGroupedMatmulFp8RhsGradient
                            : ProfiledKernel::kGroupedMatmulFp8,
      pipeline,
      [&] {
        PrefetchTensorMap(&maps.a);
        PrefetchTensorMap(&maps.b);
        PrefetchTensorMap(&maps.out);
      },
      [&] { FindFirstTile<kKind>(params, pipeline); },
      [&](int block_rank) { RunProducer(pipeline, Loader{maps, block_rank, up_offset, 1}); },
      [&](int block_rank) { RunScheduler<kKind>(params, pipeline, block_rank); },
      [&] { Fp8Consumer<A, B, Scales, Epilogue>(maps, params, scales, pipeline).Run(); });
}

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_FP8_ROLES_CUH_
