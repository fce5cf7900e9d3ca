// Signals to peers: this rank has entered the call, has sent a token chunk, or returns a credit.
#ifndef JAX_EP_DEVICE_PROTOCOL_SIGNAL_CUH_
#define JAX_EP_DEVICE_PROTOCOL_SIGNAL_CUH_

#include "ffi/device/protocol/wait.cuh"

namespace jax_ep {

// Called by one warp. Signals all peers that this rank has entered the call.
__device__ inline void SignalEntry(const CallParams& call, uint64_t sequence, bool poisoned) {
  const ControlBlock* const control = call.control;
  InjectDelay(call, sequence, 2);
  ForEachPeer(control,
              [&](int peer) { StoreEntry(control, peer, sequence, call.fingerprint, poisoned); });
}

// Called by a role that holds `ticket`, if HasWorkspace. The first warp of the holder of ticket 0
// signals entry.
__device__ inline void SignalEntryOnFirstTicket(const CallParams& call, uint64_t sequence,
                                                int ticket, bool poisoned,
                                                const RoleContext& role) {
  if (ticket == 0 && role.Warp() == 0 && MayStoreToPeers(call))
    SignalEntry(call, sequence, poisoned);
}

// Called by one warp. Sets the flag of a chunk at all peers, which wait for it at `wait_point`.
__device__ inline void SignalChunk(const CallParams& call, WaitPoint wait_point, int chunk,
                                   uint64_t sequence) {
  const ControlBlock* const control = call.control;
  ForEachPeer(control,
              [&](int peer) { StoreChunkFlag(control, peer, wait_point, chunk, sequence); });
}

// Called by one warp whose lane 0 has counted what belongs to the chunk. Signals if it `is_last`.
__device__ inline void SignalChunkIfLast(const CallParams& call, bool is_last, WaitPoint wait_point,
                                         int chunk, uint64_t sequence, uint32_t salt) {
  if (!__shfl_sync(kFullWarp, is_last, 0)) return;
  InjectDelay(call, sequence, salt);
  __syncwarp();  // orders what lane 0 has acquired by counting before each lane's release
  SignalChunk(call, wait_point, chunk, sequence);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_SIGNAL_CUH_
