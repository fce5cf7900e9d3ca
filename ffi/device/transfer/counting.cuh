// Counting choices of experts in order.
#ifndef JAX_EP_DEVICE_TRANSFER_COUNTING_CUH_
#define JAX_EP_DEVICE_TRANSFER_COUNTING_CUH_

#include "ffi/device/protocol/call.h"
#include "ffi/device/protocol/wait.cuh"

namespace jax_ep {

// What an id counts as: an expert, a bad id, or nothing (-1).
__device__ inline int BinOf(const Call& call, int32_t id) {
  const bool is_expert = 0 <= id && id < call.num_experts;
  return is_expert ? id : id == -1 ? -1 : call.num_experts;
}

// Counts what the lanes have, in their order; returns how many of the lane's bin came before. By
// one warp, whose counts they are. Nothing is counted in bin -1.
__device__ inline int32_t CountInOrder(int32_t* counts, int bin) {
  const uint32_t same = __match_any_sync(kFullWarp, bin);
  const uint32_t lower = same & ((1u << threadIdx.x % 32) - 1);
  const int32_t before = bin >= 0 ? counts[bin] : 0;
  __syncwarp();
  if (bin >= 0 && lower == 0) counts[bin] = before + __popc(same);
  __syncwarp();
  return before + __popc(lower);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_COUNTING_CUH_
