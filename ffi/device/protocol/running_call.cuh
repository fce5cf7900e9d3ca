// The running call: its workspace and its peers.
#ifndef JAX_EP_DEVICE_PROTOCOL_RUNNING_CALL_CUH_
#define JAX_EP_DEVICE_PROTOCOL_RUNNING_CALL_CUH_

#include "ffi/device/protocol/call_params.h"
#include "ffi/device/protocol/role_context.cuh"
#include "ffi/device/ptx/memory.cuh"

namespace jax_ep {

inline constexpr uint32_t kFullWarp = 0xffffffffu;

// Returns whether the workspace is large enough for the call, and the group is the one it is for.
__device__ inline bool HasWorkspace(const CallParams& call) {
  const ControlBlock* const control = call.control;
  return call.workspace_bytes <= control->workspace_bytes && call.num_ranks == control->num_ranks;
}

// Called by one warp. Calls use(peer) for every member of the generation but this rank, in
// different lanes.
template <typename Use>
__device__ inline void ForEachPeer(const ControlBlock* control, Use use) {
#pragma unroll 1
  for (int i = LaneIndex(); i < control->num_peers; i += 32) use(int{control->peer_ranks[i]});
}

// Returns the flags of a wait point, kChunk or kCredit, in the inbox of the waiting rank.
__device__ inline ChunkFlags& ChunkFlagsAt(Inbox* inbox, WaitPoint wait_point) {
  return wait_point == WaitPoint::kCredit ? inbox->credits : inbox->chunks_sent;
}

// Test only: delays the caller at random, to provoke rare interleavings.
__device__ inline void InjectDelay(const CallParams& call, uint64_t sequence, uint32_t salt) {
  const uint64_t max_delay = call.control->max_delay_ns;
  if (max_delay == 0) return;
  const uint64_t start = GlobalTimer();
  uint64_t hash = (sequence * kMaxRanks + call.control->rank) * 8 + salt + start * 1024;
  hash = (hash ^ (hash >> 31)) * 0xbf58476d1ce4e5b9ull;
  const uint64_t delay = (hash >> 33) % max_delay;
  while (GlobalTimer() - start < delay) __nanosleep(200);
}

// The same for one of many items, so that a call takes no longer than its longest delays.
__device__ inline void InjectDelayOfItem(const CallParams& call, uint64_t sequence, uint32_t salt,
                                         int item) {
  if (item % 16 == static_cast<int>(sequence % 16) || item == 0) InjectDelay(call, sequence, salt);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_RUNNING_CALL_CUH_
