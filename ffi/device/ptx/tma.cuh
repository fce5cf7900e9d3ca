// TMA: copies of boxes of a tensor map to and from shared memory (sm_90).
#ifndef JAX_EP_DEVICE_PTX_TMA_CUH_
#define JAX_EP_DEVICE_PTX_TMA_CUH_

#include "ffi/device/common/integers.h"
#include "ffi/device/ptx/tma_coordinates.cuh"

namespace jax_ep {

// Called by one thread. Copies a box to shared memory; elements outside of the tensor are zero, and
// count as bytes at the barrier.
__device__ inline void TmaLoad(uint32_t to, const void* tensor_map, uint32_t barrier,
                               const TmaCoordinates& at) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(tensor_map), "r"(barrier), "r"(at.column), "r"(at.row), "r"(at.block), "r"(at.matrix),
      "r"(at.round)
      : "memory");
}

// TmaLoad of what will not be read again: the L2 cache evicts it first.
__device__ inline void TmaLoadEvictFirst(uint32_t to, const void* tensor_map, uint32_t barrier,
                                         const TmaCoordinates& at) {
  asm volatile(
      "{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], policy;\n}" ::"r"(to),
      "l"(tensor_map), "r"(barrier), "r"(at.column), "r"(at.row), "r"(at.block), "r"(at.matrix),
      "r"(at.round)
      : "memory");
}

// Called by one thread. Copies a box to global memory, except elements outside of the tensor.
__device__ inline void TmaStore(const void* tensor_map, uint32_t from, const TmaCoordinates& at) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(tensor_map),
      "r"(from), "r"(at.column), "r"(at.row), "r"(at.block), "r"(at.matrix), "r"(at.round)
      : "memory");
}

// TmaStore, but adds the box's float32 elements to those in global memory.
__device__ inline void TmaReduceAdd(const void* tensor_map, uint32_t from,
                                    const TmaCoordinates& at) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.5d.global.shared::cta.add.bulk_group"
      " [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(tensor_map),
      "r"(from), "r"(at.column), "r"(at.row), "r"(at.block), "r"(at.matrix), "r"(at.round)
      : "memory");
}

// TmaLoad into the same shared address of all `blocks` of the cluster (a bit each). In each block
// the barrier at the same address counts the bytes.
__device__ inline void TmaLoadMulticast(uint32_t to, const void* tensor_map, uint32_t barrier,
                                        const TmaCoordinates& at, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
      "l"(tensor_map), "r"(barrier), "r"(at.column), "r"(at.row), "r"(at.block), "r"(at.matrix),
      "r"(at.round), "h"(blocks)
      : "memory");
}

__device__ inline void PrefetchTensorMap(const void* tensor_map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(tensor_map) : "memory");
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PTX_TMA_CUH_
