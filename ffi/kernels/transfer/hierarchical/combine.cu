// combine over several NVLink domains, in one kernel. Every block
//
//   1. takes prologue items: ranges of the plan, which it inverts, so that each token finds its
//      rows;
//   2. waits until its domain has entered the call;
//   3. takes items of CombineStreams.
//
// Shared memory: a SumPipeline per warp.
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/protocol/work_items.cuh"
#include "ffi/device/transfer/hierarchical/combine_streams.cuh"
#include "ffi/device/transfer/hierarchical/end.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

// Called by all warps, if the domain has entered the call. Returns kPoisoned if a plan is poisoned.
template <typename Type>
__device__ Outcome CombineTokens(const HierarchicalCombineParams& params, const RoleContext& role,
                                 uint64_t sequence, bool poisoned, bool is_poisoned_here,
                                 StreamItem* scratch) {
  constexpr int kStages = 8;
  static_assert(SumPipeline<kStages>::kBytes == kSumPipelineBytes);
  const CallParams& call = params.combine.call;
  const SumPipeline<kStages> pipeline(role);
  const auto sum = [&](const SumTerms<2>& terms, int first, int end, PeerPointer<uint4> to) {
    SumRows<Type>(pipeline, terms, first, end, to);
  };
  // The first blocks to ask push, because these surely run.
  const int ticket = NextTicket(&call.control->progress.sender_tickets, role);
  const bool pushes = ticket < params.num_push_blocks;
  const CombineChunks chunks(params, role, sequence, poisoned, sum);
  CombineStreams streams(params, chunks, role, sequence, pushes, is_poisoned_here);
  const Outcome outcome =
      RunStreams(call, role, streams, &call.control->hierarchical.send_claims, sequence, scratch);
  if (outcome != Outcome::kArrived) return outcome;
  if (!is_poisoned_here && !streams.has_found_poison()) return Outcome::kArrived;
  if (role.Thread() == 0) RecordFailure(call, Outcome::kPoisoned);
  return Outcome::kPoisoned;
}

}  // namespace

template <typename Type>
__global__ void __launch_bounds__(kCombineThreads, 2)
    HierarchicalCombineKernel(const __grid_constant__ HierarchicalCombineParams params) {
  const ProfileKernel profile(ProfiledKernel::kHierarchicalCombine);
  const CombineParams& combine = params.combine;
  const CallParams& call = combine.call;
  const Domains& domains = params.layout.domains;
  Progress& progress = call.control->progress;
  __shared__ RoleScratch scratch;
  __shared__ StreamItem item;
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
    outcome = CombineTokens<Type>(params, role, sequence, poisoned, is_poisoned_here, &item);
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
