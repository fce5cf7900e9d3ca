// combine over several NVLink domains, in one kernel. Every block
//
//   1. takes prologue items: ranges of the plan, which it inverts, so that each token finds its
//      rows;
//   2. waits until its domain has entered the call;
//   3. runs items of CombineStreams: the last warp takes them, the others add up.
//
// Shared memory: a SumPipeline per warp that adds up.
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/protocol/work_items.cuh"
#include "ffi/device/transfer/hierarchical/combine_streams.cuh"
#include "ffi/device/transfer/hierarchical/end.cuh"
#include "ffi/device/transfer/hierarchical/item_queue.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

// Called by all warps, if the domain has entered the call. Returns the outcome of this warp's work:
// kPoisoned if a plan is poisoned.
template <typename Type>
__device__ Outcome CombineTokens(const HierarchicalCombineParams& params, const RoleContext& role,
                                 uint64_t sequence, bool poisoned, bool is_poisoned_here,
                                 ItemQueue* queue) {
  constexpr int kStages = 8;
  static_assert(SumPipeline<kStages>::kBytes == kSumPipelineBytes);
  const CallParams& call = params.combine.call;
  const SumPipeline<kStages> pipeline(role);
  const auto sum = [&](const auto& terms, int first, int end, PeerPointer<uint4> to) {
    SumRows<Type>(pipeline, terms, first, end, to);
  };
  if (role.Thread() == 0) *queue = {};
  role.Sync();
  const CombineChunks chunks(params, sequence, poisoned, sum);
  CombineStreams streams(params, chunks, sequence, is_poisoned_here);
  auto outcome = Outcome::kArrived;
  if (role.Thread() >= kCombineThreads) {
    ClaimWords* const claims = &call.control->hierarchical.send_claims;
    outcome = TakeItems(call, role, streams, claims, sequence, queue);
  } else {
    RunUnits(streams, queue);
    outcome = streams.outcome();
  }
  if (outcome == Outcome::kArrived && is_poisoned_here) outcome = Outcome::kPoisoned;
  if (outcome != Outcome::kArrived && LaneIndex() == 0) RecordFailure(call, outcome);
  return outcome;
}

}  // namespace

template <typename Type>
__global__ void __launch_bounds__(kHierarchicalCombineThreads, 2)
    HierarchicalCombineKernel(const __grid_constant__ HierarchicalCombineParams params) {
  const ProfileKernel profile(ProfiledKernel::kHierarchicalCombine,
                              1u | 1u << kCombineThreads / 32);
  const CombineParams& combine = params.combine;
  const CallParams& call = combine.call;
  const Domains& domains = params.layout.domains;
  Progress& progress = call.control->progress;
  __shared__ RoleScratch scratch;
  __shared__ ItemQueue queue;
  const RoleContext role = RoleContext::WholeBlock(&scratch);
  const uint64_t sequence = BeginCall(call, role);
  if (sequence == 0) return FillWithNan(combine, role.GridThreads());
  const bool poisoned = *combine.plan.status != 0;

  const bool has_workspace = HasWorkspace(call);
  for (int ticket;
       (ticket = NextTicket(&progress.block_tickets, role)) < call.num_prologue_items;) {
    if (has_workspace) {
      SignalDomainEntry(call, domains, sequence, ticket, poisoned, role);
      InvertRows(call, combine.plan, ticket, call.num_prologue_items, role.BlockThreads());
    }
    FinishItem(&progress.items_finished, false, role);
  }
  // The barrier at the end of WaitForDomainEntry makes the items' results visible to all threads.
  if (role.Thread() == 0) WaitForItems(&progress.items_finished, call.num_prologue_items);
  Outcome outcome = WaitForDomainEntry(call, domains, sequence, role);
  // A rank with a poisoned plan takes part, or its peers would wait.
  if (outcome == Outcome::kArrived || outcome == Outcome::kPoisoned) {
    const bool is_poisoned_here = poisoned || outcome == Outcome::kPoisoned;
    outcome = CombineTokens<Type>(params, role, sequence, poisoned, is_poisoned_here, &queue);
  }
  const BlockEnd end = FinishBlock(call, role, outcome);
  if (!end.is_last) return;
  const Outcome failure = KernelOutcome(call, role, end);
  if (failure != Outcome::kArrived) FillWithNan(combine, role.BlockThreads());
  constexpr int kMetadata = 1;
  FinishHierarchicalCall(call, params.layout, role, sequence, kMetadata + params.layout.num_chunks,
                         failure);
}

template __global__ void HierarchicalCombineKernel<BFloat16>(
    const __grid_constant__ HierarchicalCombineParams params);
template __global__ void HierarchicalCombineKernel<Float16>(
    const __grid_constant__ HierarchicalCombineParams params);
template __global__ void HierarchicalCombineKernel<Float32>(
    const __grid_constant__ HierarchicalCombineParams params);

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

const void* HierarchicalCombineKernelAddress(RowType type) {
  switch (type) {
    case RowType::kBFloat16:
      return reinterpret_cast<const void*>(HierarchicalCombineKernel<BFloat16>);
    case RowType::kFloat16:
      return reinterpret_cast<const void*>(HierarchicalCombineKernel<Float16>);
    case RowType::kFloat32:
      return reinterpret_cast<const void*>(HierarchicalCombineKernel<Float32>);
  }
  return nullptr;
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
