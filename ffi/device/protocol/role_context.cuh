// A role is what some warps of each block of a kernel do. It knows its threads, blocks and shared
// memory by a context instead of threadIdx and gridDim, so that the warps of another kernel can run
// it, too.
#ifndef JAX_EP_DEVICE_PROTOCOL_ROLE_CONTEXT_CUH_
#define JAX_EP_DEVICE_PROTOCOL_ROLE_CONTEXT_CUH_

#include "ffi/device/ptx/barrier.cuh"
#include "ffi/device/ptx/shared_memory.cuh"

namespace jax_ep {

// Returns this thread's index in its warp: roles consist of whole warps.
__device__ inline int LaneIndex() { return static_cast<int>(threadIdx.x % 32); }

// Threads that share a loop: thread `index` has the iterations index, index + size, ...
struct ThreadGroup {
  int64_t index;
  int64_t size;
};

// Shared memory in which the first thread of a role tells the others what it has found.
struct RoleScratch {
  uint64_t sequence;
  bool met_host;
  uint32_t blocks_finished;
  int32_t ticket;
  uint32_t outcome;
};

struct RoleContext {
  int first_thread;  // in the block, a multiple of 32
  int num_threads;   // per block, a multiple of 32
  int block;         // this block's index among those that run the role
  int num_blocks;    // blocks that run it
  int barrier;       // a number that no other role of the block uses; 0 is for whole blocks
  RoleScratch* scratch;
  uint8_t* shared;  // the role's dynamic shared memory

  // The role of all threads of the grid.
  __device__ static RoleContext WholeBlock(RoleScratch* scratch) {
    return {0,
            static_cast<int>(blockDim.x),
            static_cast<int>(blockIdx.x),
            static_cast<int>(gridDim.x),
            0,
            scratch,
            DynamicSharedMemory()};
  }

  // Returns the role of `threads` threads of each block, from thread `first` of this role.
  __device__ RoleContext Part(int first, int threads, int part_barrier) const {
    RoleContext part = *this;
    part.first_thread += first;
    part.num_threads = threads;
    part.barrier = part_barrier;
    return part;
  }

  __device__ int Thread() const { return static_cast<int>(threadIdx.x) - first_thread; }
  __device__ int Warp() const { return Thread() / 32; }
  __device__ int NumWarps() const { return num_threads / 32; }

  // The warps of all blocks, the first ones of all blocks first.
  __device__ int GridWarp() const { return Warp() * num_blocks + block; }
  __device__ int NumGridWarps() const { return NumWarps() * num_blocks; }

  __device__ ThreadGroup BlockThreads() const { return {Thread(), num_threads}; }
  __device__ ThreadGroup GridThreads() const {
    return {int64_t{block} * num_threads + Thread(), int64_t{num_blocks} * num_threads};
  }

  // Synchronizes the threads of the role in this block.
  __device__ void Sync() const {
    if (barrier == 0) {
      __syncthreads();
    } else {
      NamedBarrier(barrier, num_threads);
    }
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_ROLE_CONTEXT_CUH_
