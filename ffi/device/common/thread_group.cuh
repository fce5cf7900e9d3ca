// ThreadGroup that do something together.
#ifndef JAX_EP_DEVICE_COMMON_THREAD_GROUP_CUH_
#define JAX_EP_DEVICE_COMMON_THREAD_GROUP_CUH_

#include "ffi/device/ptx/barrier.cuh"

namespace jax_ep {

// This one's number among them, and how many there are.
struct ThreadGroup {
  int64_t number;
  int64_t count;

  __device__ static ThreadGroup Grid() {
    return {int64_t{blockIdx.x} * blockDim.x + threadIdx.x, int64_t{gridDim.x} * blockDim.x};
  }
  __device__ static ThreadGroup Block() { return {threadIdx.x, blockDim.x}; }
  // The first ones of the block; this is one of them.
  __device__ static ThreadGroup FirstThreads(int count) { return {threadIdx.x, count}; }

  // All threads of a block, or its first ones.
  __device__ void Sync() const {
    if (count == blockDim.x) {
      __syncthreads();
    } else {
      NamedBarrier(1, static_cast<int>(count));
    }
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_COMMON_THREAD_GROUP_CUH_
