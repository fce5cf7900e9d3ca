// Barriers in shared memory that bulk copies complete, the copies, and whose they are (sm_90).
#ifndef JAX_EP_DEVICE_MBARRIER_CUH_
#define JAX_EP_DEVICE_MBARRIER_CUH_

#include "ffi/device/integers.h"
#include "ffi/device/tensor_map.h"

namespace jax_ep {

// One thread of a warp, always the same. The compiler knows that it is one, and keeps its addresses
// and coordinates in the registers that copies take them from: a copy is 4 instructions then
// instead of 13.
__device__ inline bool IsElected() {
  uint32_t is_elected;
  asm volatile(
      "{\n.reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;\n}"
      : "=r"(is_elected));
  return is_elected != 0;
}

// All addresses are of the shared space.
__device__ inline void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After InitBarrier, before other threads and the copy engine see the barriers.
__device__ inline void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Does not wait for loads before it whose words are not used.
__device__ inline void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for so many bytes of copies.
__device__ inline void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Returns when the phase of this parity is complete: what was copied for it can be read.
__device__ inline void WaitBarrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@done bra DONE;\n"
      "bra WAIT;\n"
      "DONE:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether that phase is complete; may also say so of none, late.
__device__ inline bool IsComplete(uint32_t barrier, uint32_t parity) {
  uint32_t is_complete;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(is_complete)
      : "r"(barrier), "r"(parity)
      : "memory");
  return is_complete != 0;
}

// Where a box of a tensor map begins; `column` is the innermost. Of maps whose boxes have several
// blocks of columns side by side, `block` is the first one's number, else 0.
struct BoxPlace {
  int column;
  int row;
  int block;
  int matrix;
  int round = 0;  // kPrefixRows in a map of prefixes, which takes addresses back by as many rows
};

// In a map of prefixes (tensor_maps.h): row `row` and those that follow it, but none from `end` on.
__device__ inline BoxPlace RowsUntil(int end, int column, int row, int block = 0) {
  return {column, kPrefixRows - (end - row), block, end, kPrefixRows};
}

// Copies a box. What is outside of the tensor becomes zeros and counts as bytes, too. By one
// thread.
__device__ inline void CopyBox(uint32_t to, const void* tensor_map, uint32_t barrier,
                               const BoxPlace& at) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(tensor_map), "r"(barrier), "r"(at.column), "r"(at.row), "r"(at.block), "r"(at.matrix),
      "r"(at.round)
      : "memory");
}

// Copies a box to a tensor; what is outside of it is left out. By one thread.
__device__ inline void StoreBox(const void* tensor_map, uint32_t from, const BoxPlace& at) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(tensor_map),
      "r"(from), "r"(at.column), "r"(at.row), "r"(at.block), "r"(at.matrix), "r"(at.round)
      : "memory");
}

// Closes a batch of this thread's copies to tensors.
__device__ inline void CommitStores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits for all of this thread's batches but the last kPending: until their shared memory may be
// written again, or until they are complete.
template <int kPending>
__device__ inline void WaitStoresRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
template <int kPending>
__device__ inline void WaitStores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ inline void PrefetchTensorMap(const void* tensor_map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(tensor_map) : "memory");
}

// What this thread stored to shared memory is seen by copies that follow.
__device__ inline void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Of `threads` threads of the block, by number 1 to 15.
__device__ inline void NamedBarrier(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MBARRIER_CUH_
