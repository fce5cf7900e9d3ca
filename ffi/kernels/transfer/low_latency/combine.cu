// Low-latency combine in one kernel (low_latency/layout.h). Every block
//
//   1. inverts the plan in its shared memory;
//   2. takes items, one per warp: sums a segment of this rank's rows of a token, and pushes the
//      partial sum to the token's rank, with a flag;
//   3. reduces the partial sums of this rank's tokens, segment by segment, as flags arrive.
//
// Shared memory: a SumPipeline per warp, then the inverted plan.
#include "ffi/device/protocol/kernel_end.cuh"
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/protocol/work_items.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/transfer/combine/partial_sums.cuh"
#include "ffi/device/transfer/low_latency/row_segments.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

constexpr int kLowLatencySumStages = 4;
static_assert(SumPipeline<kLowLatencySumStages>::kBytes == kLowLatencySumPipelineBytes);

// Not inlined: both sums share its instructions, which are then fetched once.
template <typename Type>
__device__ __noinline__ void SumSegment(SumPipeline<kLowLatencySumStages> pipeline,
                                        const SumTerms<1>& terms, int first, int end,
                                        PeerPointer<uint4> to) {
  SumRows<Type>(pipeline, terms, first, end, to);
}

// Called by all threads of a block. Inverts the plan: returns the row of each assignment, or -1, as
// [R][T][K] in shared memory after the warps' pipelines.
__device__ const int32_t* InvertPlan(const LowLatencyCombineParams& params,
                                     const RoleContext& role) {
  const ProfileSpan span(SpanKind::kInvertPlan);
  const CallParams& call = params.combine.call;
  int32_t* const rows = reinterpret_cast<int32_t*>(role.shared + kLowLatencyThreads / 32 *
                                                                     kLowLatencySumPipelineBytes);
#pragma unroll 1
  for (int i = role.Thread(); i < call.num_ranks * call.num_assignments();
       i += kLowLatencyThreads) {
    rows[i] = -1;
  }
  role.Sync();
  const int32_t end = EndOfRows(call, params.combine.plan);
#pragma unroll 1
  for (int row = role.Thread(); row < end; row += kLowLatencyThreads) {
    int assignment;
    if (FindAssignment(call, params.combine.plan, row, &assignment)) rows[assignment] = row;
  }
  role.Sync();
  return rows;
}

__device__ TokenSegment Segment(const LowLatencyCombineParams& params, const SegmentItem& item) {
  return {item.token, params.segments.First(item.segment),
          params.segments.End(item.segment, params.combine.call.wire_vectors)};
}

// Returns the index of rank 0's flag for a segment of a token; the other ranks' follow it.
__device__ int FirstFlag(const LowLatencyCombineParams& params, const SegmentItem& item) {
  return (item.token * params.segments.count() + item.segment) * params.combine.call.num_ranks;
}

// Called by one warp. Sends a segment of this rank's partial sum of a token, its own tokens
// included. It sets the flag even if there are no rows: with a wrong plan the receiver must not
// wait forever.
template <typename Sum>
__device__ void SendSum(const LowLatencyCombineParams& params, const EagerBuffers& eager,
                        const int32_t* rows, int index, SegmentFlags* flags, Sum sum) {
  const CallParams& call = params.combine.call;
  const int rank = eager.rank();
  const SegmentItem item = params.segments.Item(index, params.num_ranks_divmod);
  const int owner = call.RankAfter(rank, 1 + item.peer);
  const int k = LaneIndex();
  const int first = (owner * call.num_tokens + item.token) * call.top_k;
  TokenRowsPerLane<1> found;
  found.rows[0] = k < call.top_k ? rows[first + k] : -1;
  found.assignments = __ballot_sync(kFullWarp, found.rows[0] >= 0);
  SendPartialSum(params.combine, found, Segment(params, item), eager.At(owner).rows(),
                 eager.At(owner).scalars(), sum);
  flags->Add(eager.At(owner).flags() + (FirstFlag(params, item) + rank));
}

// Sends all partial sums of this rank. No item waits for another one, so tickets are prefetched.
template <typename Sum>
__device__ void SendSums(const LowLatencyCombineParams& params, const EagerBuffers& eager,
                         uint64_t sequence, SenderStart& start, const int32_t* rows, bool poisoned,
                         Sum sum) {
  const ProfileSpan span(SpanKind::kSendSums);
  const CallParams& call = params.combine.call;
  const int num_items = call.num_all_tokens() * params.segments.count();
  SegmentFlags flags(eager);
  InjectDelay(call, sequence, 4);
  if (!start.MayStoreToPeers()) return;
#pragma unroll 1
  for (int ticket; (ticket = start.tickets.Next()) < num_items;) {
    if (!poisoned) SendSum(params, eager, rows, ticket, &flags, sum);
    // With the first item: peers detect a mismatch, or a poisoned plan that sends nothing.
    if (ticket == 0) SignalEntry(call, sequence, poisoned);
  }
  flags.Signal();
}

// Called by all warps. Reduces the partial sums of this rank's tokens, in a static order.
template <typename Sum>
__device__ Outcome ReduceTokens(const LowLatencyCombineParams& params, const RoleContext& role,
                                const EagerBuffers& eager, uint64_t sequence, Sum sum) {
  const ProfileSpan span(SpanKind::kReduce);
  const CallParams& call = params.combine.call;
  const int num_items = call.num_tokens * params.segments.count();
  const int num_warps = role.num_blocks * (kLowLatencyThreads / 32);
#pragma unroll 1
  for (int index = role.GridWarp(); index < num_items; index += num_warps) {
    const SegmentItem item = params.segments.Item(index, FastDivmod());
    const KeptAssignments<1> kept(params.combine, item.token);
    const uint64_t* const flags = &eager.Local().flags()[FirstFlag(params, item)];
    const Outcome outcome = WaitForSegments(call, sequence, [&] {  // WAIT_SEGMENT
      uint32_t missing = kMaxRanks;
#pragma unroll 1
      for (int peer = LaneIndex(); peer < call.num_ranks; peer += 32) {
        if (LoadAcquireSystem(&flags[peer]) != eager.tag()) {
          missing = min(missing, static_cast<uint32_t>(peer));
        }
      }
      return missing;
    });
    if (outcome != Outcome::kArrived) return outcome;
    ReducePartialSums(params.combine, kept, Segment(params, item), eager.Local().rows(),
                      eager.Local().scalars(), sum);
  }
  return Outcome::kArrived;
}

}  // namespace

template <typename Type>
__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    LowLatencyCombineKernel(const __grid_constant__ LowLatencyCombineParams params) {
  const ProfileKernel profile(ProfiledKernel::kLowLatencyCombine);
  const CallParams& call = params.combine.call;
  __shared__ RoleScratch scratch;
  const RoleContext role = RoleContext::WholeBlock(&scratch);
  ClaimRequest claim(call, role);
  SenderStart start(call, true);
  const int32_t plan_status = *params.combine.plan.status;
  const int32_t* const rows = InvertPlan(params, role);
  const uint64_t sequence = claim.Await();
  if (sequence == 0) return FillWithNan(params.combine, role.GridThreads());
  if (claim.MetHost()) start.LoadAbortWord(call);
  const EagerBuffers eager(call, sequence);
  Outcome outcome = PlanOutcome(call, role, plan_status);  // this warp's
  const bool poisoned = outcome != Outcome::kArrived;
  if (HasWorkspace(call)) {
    const SumPipeline<kLowLatencySumStages> pipeline(role);
    const auto sum = [&](const SumTerms<1>& terms, int first, int end, PeerPointer<uint4> to) {
      SumSegment<Type>(pipeline, terms, first, end, to);
    };
    SendSums(params, eager, sequence, start, rows, poisoned, sum);
    if (!poisoned) outcome = ReduceTokens(params, role, eager, sequence, sum);
  }
  FinishLowLatencyCall(call, role, sequence, outcome,
                       [&](Outcome) { FillWithNan(params.combine, role.BlockThreads()); });
}

template __global__ void LowLatencyCombineKernel<BFloat16>(
    const __grid_constant__ LowLatencyCombineParams params);
template __global__ void LowLatencyCombineKernel<Float16>(
    const __grid_constant__ LowLatencyCombineParams params);
template __global__ void LowLatencyCombineKernel<Float32>(
    const __grid_constant__ LowLatencyCombineParams params);

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

const void* LowLatencyCombineKernelAddress(RowType type) {
  switch (type) {
    case RowType::kBFloat16:
      return reinterpret_cast<const void*>(LowLatencyCombineKernel<BFloat16>);
    case RowType::kFloat16:
      return reinterpret_cast<const void*>(LowLatencyCombineKernel<Float16>);
    case RowType::kFloat32:
      return reinterpret_cast<const void*>(LowLatencyCombineKernel<Float32>);
  }
  return nullptr;
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
