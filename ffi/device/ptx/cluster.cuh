// Thread block clusters and distributed shared memory (sm_90).
#ifndef JAX_EP_DEVICE_PTX_CLUSTER_CUH_
#define JAX_EP_DEVICE_PTX_CLUSTER_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Returns this block's rank in its cluster.
__device__ inline int ClusterRank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The barrier of all threads of the cluster, in two steps, both called by whole warps. It orders
// the initialization of mbarriers before FenceMbarrierInit, and nothing else: an arrival with
// release semantics takes half a microsecond.
__device__ inline void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ inline void ClusterWait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Maps a shared address of this block to the same address in block `rank` of the cluster. The
// functions below take such addresses.
__device__ inline uint32_t MapToBlock(uint32_t address, int rank) {
  uint32_t result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(address), "r"(rank));
  return result;
}

// Arrives at a barrier of another block. The scope is the block, as in CUTLASS: cluster scope would
// be a fence of all memory. So the arrival orders nothing that this thread has read or written.
// Before a consumer releases a buffer this way, it has waited until WGMMA has read the buffer, or
// has used the words that it loaded (TileReader).
__device__ inline void MbarrierArriveRemote(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void MbarrierArriveExpectTxRemote(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

// Stores 16 bytes to another block, and completes them at a barrier of that block. (A plain store
// followed by a releasing arrival costs a fence of all memory, half a microsecond.)
__device__ inline void StoreAsyncRemote(uint32_t to, const int32_t (&words)[4], uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]), "r"(barrier)
      : "memory");
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_CLUSTER_CUH_
