// The order of steps of the sm_90 matmul kernels, and which warps have which role.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_WARP_ROLES_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_WARP_ROLES_CUH_

#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/shapes.h"
#include "ffi/device/ptx/cluster.cuh"
#include "ffi/device/ptx/wgmma.cuh"

namespace jax_ep::sm90 {

// Called by all threads of a block. While the blocks of the cluster meet, one thread calls
// prefetch(), and the scheduler warp find_first_tile(). Then the producer warp calls
// produce(block_rank), the scheduler warp schedule(block_rank), and the consumer warps consume(). A
// thread of the producer's warpgroup has kProducer registers, and one of a consumer's kConsumer.
// produce_more(), if given, is called by one more warp, which stores to the stages.
template <int kProducer, int kConsumer, typename Prefetch, typename FindFirst, typename Produce,
          typename Schedule, typename Consume, typename... ProduceMore>
__device__ __forceinline__ void RunWarpRoles(ProfiledKernel kernel, const Pipeline& pipeline,
                                             const Prefetch& prefetch,
                                             const FindFirst& find_first_tile,
                                             const Produce& produce, const Schedule& schedule,
                                             const Consume& consume,
                                             const ProduceMore&... produce_more) {
  static_assert(sizeof...(ProduceMore) <= 1);
  constexpr uint32_t kFirstWarps = 1u | 1u << kWarpgroupWarps | 1u << 2 * kWarpgroupWarps;
  static_assert(kConsumerWarpgroups == 2);
  const ProfileKernel profile(kernel, kFirstWarps, SharedLayout::kRecorders);
  if (threadIdx.x == 0) {
    pipeline.InitializeBarriers(sizeof...(ProduceMore) > 0);
    prefetch();
  }
  __syncwarp();
  ClusterArrive();
  const int warp = WarpUniform(threadIdx.x / 32);
  if (warp == 1) find_first_tile();
  ClusterWait();
  if (threadIdx.x < kWarpgroupThreads) {
    WarpgroupRegisterDealloc<kProducer>();
    const int block_rank = WarpUniform(ClusterRank());
    if (warp == 0) {
      produce(block_rank);
    } else if (warp == 1) {
      schedule(block_rank);
    } else if (warp == 2) {
      (produce_more(), ...);
    }
  } else {
    WarpgroupRegisterAlloc<kConsumer>();
    consume();
  }
}

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_WARP_ROLES_CUH_
