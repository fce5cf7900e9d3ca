// The order of steps of the sm_90 matmul kernels, and which warps have which role.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_WARP_ROLES_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_WARP_ROLES_CUH_

#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/shapes.h"
#include "ffi/device/ptx/cluster.cuh"
#include "ffi/device/ptx/wgmma.cuh"

namespace jax_ep::sm90 {

// Called by all threads of a block. One thread calls prefetch(), the producer warp
// produce(block_rank), the scheduler warp of the cluster schedule(), and the consumer warps
// consume(). A thread of the producer's warpgroup has kProducer registers, and one of a consumer's
// kConsumer.
template <int kProducer, int kConsumer, typename Prefetch, typename Produce, typename Schedule,
          typename Consume>
__device__ __forceinline__ void RunWarpRoles(const Pipeline& pipeline, const Prefetch& prefetch,
                                             const Produce& produce, const Schedule& schedule,
                                             const Consume& consume) {
  if (threadIdx.x == 0) {
    prefetch();
    pipeline.InitializeBarriers();
  }
  __syncwarp();
  ClusterBarrier();
  if (threadIdx.x < kWarpgroupThreads) {
    WarpgroupRegisterDealloc<kProducer>();
    const int warp = WarpUniform(threadIdx.x / 32);
    const int block_rank = WarpUniform(ClusterRank());
    if (warp == 0) {
      produce(block_rank);
    } else if (warp == 1 && block_rank == 0) {
      schedule();
    }
  } else {
    WarpgroupRegisterAlloc<kConsumer>();
    consume();
  }
  __syncwarp();
  ClusterBarrier();
}

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_WARP_ROLES_CUH_
