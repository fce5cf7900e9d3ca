// Sums over the threads of a block. All threads of the block call them together.
#ifndef JAX_EP_DEVICE_BLOCK_CUH_
#define JAX_EP_DEVICE_BLOCK_CUH_

#include "ffi/device/integers.h"

namespace jax_ep {

// The sum of `value` over lower threads, and over all of them.
struct PrefixSum {
  int64_t before;
  int64_t total;
};

__device__ __noinline__ inline PrefixSum PrefixSumOfBlock(int64_t value) {
  __shared__ int64_t warp_sums[32];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  int64_t through = value;  // inclusive, within the warp
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t lower = __shfl_up_sync(0xffffffffu, through, distance);
    if (lane >= distance) through += lower;
  }
  __syncthreads();  // an earlier call's sums have been read
  if (lane == 31) warp_sums[warp] = through;
  __syncthreads();
  PrefixSum sum{through - value, 0};
  for (int other = 0; other < blockDim.x / 32; ++other) {
    if (other < warp) sum.before += warp_sums[other];
    sum.total += warp_sums[other];
  }
  return sum;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_BLOCK_CUH_
