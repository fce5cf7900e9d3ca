// Low-latency redispatch over several NVLink domains, in one kernel (low_latency/layout.h):
// dispatch with a known plan, without ids and counts. All warps
//
//   1. send this rank's tokens to the ranks that the plan names (RowSender);
//   2. tell weights to the domain and the rail partners, spread what partners tell
//   (MetadataSpread),
//      and send their tokens on in the domain;
//   3. copy segments to rows as they arrive, and fill the rows that come from no token.
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/transfer/dispatch/results.cuh"
#include "ffi/device/transfer/hierarchical/forwarding.cuh"
#include "ffi/device/transfer/hierarchical/low_latency/end.cuh"
#include "ffi/device/transfer/hierarchical/low_latency/send_rows.cuh"
#include "ffi/device/transfer/hierarchical/low_latency/spread.cuh"
#include "ffi/device/transfer/low_latency/planned_segments.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

// Where tokens go by the plan. Peers that wait for a token must get it, so a rank with a poisoned
// plan sends all tokens to all ranks. Flags are set even where a token has no row: a wrong plan
// gives wrong rows, but the receiver must not wait forever.
struct PlannedSegmentRouting {
  const HierarchicalLowLatencyRedispatchParams& params;
  const bool to_all;
  static constexpr bool flags_all = true;

  __device__ int Own(int assignment) const {
    const int32_t to = params.redispatch.plan.destination[assignment];
    return to < params.redispatch.tokens.call.num_ranks ? to : -1;
  }

  struct Ranks {
    const Domains& domains;
    uint32_t bits;
    __device__ bool GoesTo(int rank) const { return (bits >> domains.Index(rank) & 1) != 0; }
  };
  __device__ Ranks Forwarded(const Rail& rail, int token) const {
    const CallParams& call = params.redispatch.tokens.call;
    const Domains& domains = params.layout.domains;
    const uint32_t bits =
        *TokenRanks(call, domains, params.forwarding.token_ranks, rail.domain(), token);
    return {domains, to_all ? ~0u : bits};
  }
};

// Called by one warp. Sends 32 weights to the domain.
__device__ void PushWeights(const TokenParams& tokens, const HierarchicalLayout& layout,
                            const DomainEagerBuffers& eager, int item) {
  const CallParams& call = tokens.call;
  const int assignment = 32 * item + LaneIndex();
  if (assignment >= call.num_assignments()) return;
  const uint64_t weight = __float_as_uint(tokens.topk_weights[assignment]);
  ForEachDomainRank(call, layout.domains, eager.rank(), [&](int to) {
    StorePacket(eager.At(to).packets() + (eager.rank() * call.num_assignments() + assignment),
                weight << 32, eager.tag());
  });
}

// Called by one warp. Tells a rail partner that this domain has entered the call, and the weights.
__device__ Outcome TellPartner(const TokenParams& tokens, const HierarchicalLayout& layout,
                               uint64_t sequence, int index) {
  const CallParams& call = tokens.call;
  const Rail rail(call, layout, index);
  Outcome outcome = WaitForDomainEntry(call, layout.domains, sequence);
  if (outcome != Outcome::kArrived) return outcome;
  outcome = WaitForCredit(call, layout, sequence, rail, 0);
  if (outcome != Outcome::kArrived) return outcome;
  const MetadataParts parts(0, false, tokens.has_weights, call.num_assignments());
  const PeerPointer<float> to = (rail.Packed(0) + parts.weights).As<float>();
#pragma unroll 4
  for (int i = LaneIndex(); tokens.has_weights && i < call.num_assignments(); i += 32) {
    StoreToPeer(to + i, tokens.topk_weights[i]);
  }
  __syncwarp();
  if (LaneIndex() == 0) {
    PackHeader(call, rail, 0, parts.bytes, 0, false);
    rail.Put(0);
  }
  return Outcome::kArrived;
}

// Called by all warps.
__device__ Outcome Send(const HierarchicalLowLatencyRedispatchParams& params,
                        const DomainEagerBuffers& eager, uint64_t sequence, bool poisoned) {
  const TokenParams& tokens = params.redispatch.tokens;
  const CallParams& call = tokens.call;
  const HierarchicalLayout& layout = params.layout;
  const PlannedSegmentRouting routing = {params, poisoned};
  RowSender sender(tokens, layout, params.sizes, routing, eager, sequence);
  Outcome outcome = sender.SendOwn();
  const MetadataSpread spread(call, layout, eager, sequence, false, tokens.has_weights);
  const int num_entries = 1 + (tokens.has_weights ? CeilDivide(call.num_assignments(), 32) : 0);
  const int num_tells = num_entries + layout.domains.num_rails();
  const int num_spreads = num_tells + spread.NumItems();
  const int num_items = num_spreads + sender.NumForwards();
#pragma unroll 1
  while (outcome == Outcome::kArrived) {
    const int item = NextWarpTicket(&call.control->progress.warp_tickets);
    if (item >= num_items) break;
    if (item < num_entries) {
      if (!MayStoreToPeers(call)) continue;  // the next wait finds the abort
      if (item == 0) {
        SignalDomainEntry(call, layout.domains, sequence, false);
      } else {
        PushWeights(tokens, layout, eager, item - 1);
      }
    } else if (item < num_tells) {
      outcome = TellPartner(tokens, layout, sequence, item - num_entries);
    } else if (item < num_spreads) {
      outcome = spread.Run(item - num_tells);
    } else {
      outcome = sender.Forward(item - num_spreads);
    }
  }
  sender.FinishForwards();
  return outcome;
}

// Called by one warp. Copies the segments of the first two lanes in `lanes`, and removes the two.
// These lanes poll for their own segments, so that both are waited for at once.
__device__ Outcome CopySegments(const HierarchicalLowLatencyRedispatchParams& params,
                                const DomainEagerBuffers& eager, uint64_t sequence,
                                const RowSegmentItem& mine, uint32_t* lanes) {
  const TokenParams& tokens = params.redispatch.tokens;
  const CallParams& call = tokens.call;
  const RowSegments& segments = params.sizes.segments;
  const auto local = eager.Local();
  const auto received = [&](const RowSegmentItem& item) {
    const int token = params.top_k_divmod.Quotient(item.assignment) - item.source * call.num_tokens;
    return ReceivedSegment(tokens, params.layout, params.sizes, eager, item.source, token,
                           item.segment);
  };
  const uint32_t before = *lanes;
  const RowSegmentItem items[] = {Take(mine, lanes), Take(mine, lanes)};
  const bool polls = ((before ^ *lanes) >> (LaneIndex()) & 1) != 0;
  const bool has_weight = polls && tokens.has_weights && mine.segment == 0;
  uint64_t packed = 0;
  const Outcome outcome = WaitForSegments(call, params.layout, sequence, [&] {  // WAIT_SEGMENT
    uint64_t tag = eager.tag();
    if (has_weight) LoadRelaxedSystem(&local.packets()[mine.assignment], &packed, &tag);
    const bool has_arrived = tag == eager.tag() && (!polls || received(mine).HasArrived());
    return static_cast<uint32_t>(has_arrived ? kMaxRanks : mine.source);
  });
  if (outcome != Outcome::kArrived) return outcome;
  if (has_weight) {
    tokens.row_weights[mine.row] = __uint_as_float(static_cast<uint32_t>(packed >> 32));
  }
  const auto source_of = [&](const RowSegmentItem& item) {
    return item.source < 0 ? RowSource{nullptr} : received(item).Source();
  };
  const RowSource from[] = {source_of(items[0]), source_of(items[1])};
  const auto make_copy = [&](int j) {
    const bool is_row = from[j].payload != nullptr;
    return SegmentCopy(segments, items[j].segment, is_row ? call.result_vectors : 0,
                       is_row ? call.num_scale_words : 0);
  };
  SegmentCopy copies[] = {make_copy(0), make_copy(1)};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    copies[j].Load(call, from[j]);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    copies[j].Store(RowAddress(tokens, items[j].row), RowScales(tokens, items[j].row));
  }
  return Outcome::kArrived;
}

// Called by all warps. Copies all segments, then fills the rows that come from no token, in a
// static order.
__device__ Outcome CopyAndFill(const HierarchicalLowLatencyRedispatchParams& params,
                               const RoleContext& role, const DomainEagerBuffers& eager,
                               uint64_t sequence) {
  const TokenParams& tokens = params.redispatch.tokens;
  const PlanOperands& plan = params.redispatch.plan;
  return CopyPlannedRows(tokens, plan, params.sizes.segments, role, sequence, role.NumGridWarps(),
                         [&](const RowSegmentItem& mine, uint32_t* lanes) {
                           return CopySegments(params, eager, sequence, mine, lanes);
                         });
}

}  // namespace

__global__ void __launch_bounds__(kLowLatencyThreads, 1) HierarchicalLowLatencyRedispatchKernel(
    const __grid_constant__ HierarchicalLowLatencyRedispatchParams params) {
  const ProfileKernel profile(ProfiledKernel::kHierarchicalLowLatencyRedispatch);
  const TokenParams& tokens = params.redispatch.tokens;
  const CallParams& call = tokens.call;
  __shared__ RoleScratch scratch;
  const RoleContext role = RoleContext::WholeBlock(&scratch);
  const uint64_t sequence = BeginCall(call, role);
  if (sequence == 0) return FillWithNan(tokens, role.GridThreads());
  const bool poisoned = *params.redispatch.plan.status != 0;
  const DomainEagerBuffers eager(call, sequence,
                                 DomainEagerLayout(call, params.sizes.eager_offset));
  auto outcome = Outcome::kArrived;  // this warp's
  if (HasWorkspace(call)) {
    outcome = Send(params, eager, sequence, poisoned);
    if (outcome == Outcome::kArrived) {
      outcome = poisoned ? PlanOutcome(call, role, 1) : CopyAndFill(params, role, eager, sequence);
    }
  }
  FinishLowLatencyCall(call, params.layout, role, sequence, outcome,
                       [&](Outcome) { FillWithNan(tokens, role.BlockThreads()); });
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

const void* HierarchicalLowLatencyRedispatchKernelAddress() {
  return reinterpret_cast<const void*>(HierarchicalLowLatencyRedispatchKernel);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
