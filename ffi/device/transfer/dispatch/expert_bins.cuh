// Counting assignments by expert, in order.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_EXPERT_BINS_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_EXPERT_BINS_CUH_

#include "ffi/device/protocol/running_call.cuh"

namespace jax_ep {

// Returns the bin of an expert id: the expert; num_experts for a bad id; -1 if unrouted.
__device__ inline int ExpertBin(const CallParams& call, int32_t id) {
  const bool is_expert = 0 <= id && id < call.num_experts;
  return is_expert ? id : id == -1 ? -1 : call.num_experts;
}

// Called by one warp, which owns `counts`. Adds one assignment per lane, in lane order. Returns how
// many assignments of the lane's bin came before. Bin -1 is not counted.
__device__ inline int32_t CountInOrder(int32_t* counts, int bin) {
  const uint32_t same = __match_any_sync(kFullWarp, bin);
  const uint32_t lower = same & ((1u << LaneIndex()) - 1);
  const int32_t before = bin >= 0 ? counts[bin] : 0;
  __syncwarp();
  if (bin >= 0 && lower == 0) counts[bin] = before + __popc(same);
  __syncwarp();
  return before + __popc(lower);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_EXPERT_BINS_CUH_
