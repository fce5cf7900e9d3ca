// How a call fails: the sticky abort word, which ends this call and all later ones of the
// generation on all ranks; the records for the host; and the failure that the last block of the
// kernel looks at.
#ifndef JAX_EP_DEVICE_PROTOCOL_ABORT_CUH_
#define JAX_EP_DEVICE_PROTOCOL_ABORT_CUH_

#include "ffi/device/protocol/peer_stores.cuh"

namespace jax_ep {

// Called by one thread.
__device__ inline void WriteRecord(const CallParams& call, AbortRecord* record, Outcome outcome,
                                   WaitPoint wait_point, int peer, uint64_t sequence) {
  const ControlBlock* const control = call.control;
  record->rank = control->rank;
  record->peer = peer;
  record->operation = call.operation;
  record->wait_point = wait_point;
  record->outcome = outcome;
  record->sequence = sequence;
  record->generation = control->generation;
  // Release: a host that sees `posted` sees the other fields.
  StoreReleaseSystem(&record->posted, 1u);
}

// Called by one thread. Reports the missing peer of a long wait to the host, once per wait point.
// Returns whether that is done. While the host has not read the warning before, it is not.
__device__ inline bool WarnHost(const CallParams& call, WaitPoint wait_point, int peer,
                                uint64_t sequence) {
  ControlBlock* const control = call.control;
  if (control->warning == nullptr) return true;
  const uint64_t key = sequence * 4 + static_cast<uint32_t>(wait_point);
  const uint64_t before = LoadAcquireSystem(&control->warned);
  if (before >= key) return true;
  if (LoadAcquireSystem(&control->warning->posted) != 0) return false;
  if (CompareAndSwapDevice(&control->warned, before, key) != before) return false;
  WriteRecord(call, control->warning, Outcome::kArrived, wait_point, peer, sequence);
  return true;
}

// Called by one warp. Sets the abort word of all peers.
__device__ inline void ForwardAbort(const CallParams& call, uint32_t word) {
  const ControlBlock* const control = call.control;
  ForEachPeer(control, [&](int peer) { StoreAbort(control, peer, word); });
}

// Called by one warp. Aborts this call and all later ones of the generation, on all ranks.
__device__ inline void AbortGroup(const CallParams& call, Outcome outcome, WaitPoint wait_point,
                                  int peer, uint64_t sequence) {
  const ControlBlock* const control = call.control;
  const auto word = static_cast<uint32_t>(outcome);
  // The first warp of this device to set the word reports. If a peer has set it, the peer reports.
  const bool is_leader = LaneIndex() == 0;
  if (is_leader && CompareAndSwapSystem(&control->inbox->abort, 0, word) == 0 && control->report) {
    WriteRecord(call, control->report, outcome, wait_point, peer, sequence);
  }
  // Two ranks that forward before they look at their own words would both leave the report to the
  // other one.
  __syncwarp();
  ForwardAbort(call, word);
}

// Called by one whole warp; all lanes return the same. Returns whether a call may store to its
// peers and signal before it has waited. After an abort it may not: this rank may be ahead of a
// peer that still reads the stores of an earlier call.
__device__ inline bool MayStoreToPeers(const CallParams& call) {
  return __shfl_sync(kFullWarp, LoadRelaxedSystem(&call.control->inbox->abort), 0) == 0;
}

// Called by one whole warp; all lanes return the same. Returns how the group was aborted, kArrived
// if it was not. The abort is forwarded before anyone on this rank can see it, as in WaitForFlags.
__device__ inline Outcome FindAbort(const CallParams& call) {
  const uint32_t word = __shfl_sync(kFullWarp, LoadRelaxedSystem(&call.control->inbox->abort), 0);
  if (word != 0) ForwardAbort(call, word);
  return static_cast<Outcome>(word);
}

// Called by one thread. Records a failure of this kernel for its last block. An abort takes
// precedence over a poisoned plan.
__device__ inline void RecordFailure(const CallParams& call, Outcome outcome) {
  uint32_t* const failure = &call.control->progress.failure;
  const auto word = static_cast<uint32_t>(outcome);
  if (outcome == Outcome::kPoisoned) {
    atomicCAS(failure, 0u, word);
  } else {
    atomicExch(failure, word);
  }
}

// Called by all threads of a low-latency kernel that has a plan. Returns kPoisoned, and records it,
// if the plan is poisoned.
__device__ inline Outcome PlanOutcome(const CallParams& call, const RoleContext& role,
                                      int32_t status) {
  if (status == 0) return Outcome::kArrived;
  if (role.Thread() == 0) RecordFailure(call, Outcome::kPoisoned);
  return Outcome::kPoisoned;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_ABORT_CUH_
