// A group of cooperating threads: the grid, a block, or the first threads of a block.
#ifndef JAX_EP_DEVICE_COMMON_THREAD_GROUP_CUH_
#define JAX_EP_DEVICE_COMMON_THREAD_GROUP_CUH_

#include "ffi/device/ptx/barrier.cuh"

namespace jax_ep {

struct ThreadGroup {
  int64_t index;  // this thread's index
  int64_t size;

  __device__ static ThreadGroup Grid() {
    return {int64_t{blockIdx.x} * blockDim.x + threadIdx.x, int64_t{gridDim.x} * blockDim.x};
  }
  __device__ static ThreadGroup Block() { return {threadIdx.x, blockDim.x}; }
  // Called by the first `size` threads of the block.
  __device__ static ThreadGroup FirstThreads(int size) { return {threadIdx.x, size}; }

  // Synchronizes the threads of a block, or its first threads, with barrier 1.
  __device__ void Sync() const {
    if (size == blockDim.x) {
      __syncthreads();
    } else {
      NamedBarrier(1, static_cast<int>(size));
    }
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_COMMON_THREAD_GROUP_CUH_
