// Low-latency dispatch over several NVLink domains, in one kernel (low_latency/layout.h). In every
// block
//
//   1. the last kCountingThreads threads collect the counts of all ranks. Those of one block count
//      this rank's assignments first, and tell them to the domain and the rail partners;
//   2. the other warps send this rank's tokens (RowSender), spread what partners tell
//      (MetadataSpread), and send their tokens on in the domain;
//   3. all warps compute quotas and groups, each block for itself;
//   4. warps expand segments into rows as they arrive, and fill the rows that come from no token.
//
// Shared memory: the tile's counts, then the quotas.
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/transfer/dispatch/assignment_tile.cuh"
#include "ffi/device/transfer/dispatch/incoming_counts.cuh"
#include "ffi/device/transfer/hierarchical/forwarding.cuh"
#include "ffi/device/transfer/hierarchical/low_latency/end.cuh"
#include "ffi/device/transfer/hierarchical/low_latency/send_rows.cuh"
#include "ffi/device/transfer/hierarchical/low_latency/spread.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

using Params = HierarchicalLowLatencyDispatchParams;
using CountingTile = AssignmentTile<kCountingThreads / 32, DomainRanks>;

// Where tokens go by their ids.
struct SegmentRoutingOfIds {
  const DispatchParams& params;
  MetadataParts parts;
  static constexpr bool to_all = false;
  static constexpr bool flags_all = false;

  __device__ int RankOf(int32_t expert) const {
    const CallParams& call = params.tokens.call;
    return 0 <= expert && expert < call.num_experts ? call.RankOfExpert(expert) : -1;
  }
  __device__ int Own(int assignment) const { return RankOf(params.topk_ids[assignment]); }

  struct Ranks {
    int of_lane;
    __device__ bool GoesTo(int rank) const { return __any_sync(kFullWarp, of_lane == rank); }
  };
  __device__ Ranks Forwarded(const Rail& rail, int token) const {
    const CallParams& call = params.tokens.call;
    const auto* const routes = reinterpret_cast<const int32_t*>(rail.Received(0) + parts.routes);
    const int k = LaneIndex();
    if (k >= call.top_k) return {-1};
    const auto route = static_cast<uint32_t>(LoadGlobalNoAllocate(&routes[token * call.top_k + k]));
    return {RankOf(ExpertOf(route))};
  }
};

__device__ MetadataParts PartsOf(const TokenParams& tokens) {
  const CallParams& call = tokens.call;
  return {CountPairs(call.num_experts), true, tokens.has_weights, call.num_assignments()};
}

// Called by the counting threads of one block. Counts this rank's assignments, and tells all.
__device__ Outcome CountAndTell(const HierarchicalLowLatencyDispatchParams& params,
                                const RoleContext& role, const DomainEagerBuffers& eager,
                                uint64_t sequence) {
  const TokenParams& tokens = params.dispatch.tokens;
  const CallParams& call = tokens.call;
  const HierarchicalLayout& layout = params.layout;
  const Domains& domains = layout.domains;
  const int rank = eager.rank();
  SignalDomainEntry(call, domains, sequence, 0, false, role);
  CountingTile tile(call, role, params.dispatch.topk_ids, 0, DomainRanks{&domains});
  tile.Count(eager, sequence);
  const Outcome outcome = WaitByFirstWarp(call, sequence, role, [&] {
    const Outcome aborted = FindAbort(call);
    if (aborted == Outcome::kArrived) return WaitForAllCredits(call, layout, sequence);
    if (LaneIndex() == 0) RecordFailure(call, aborted);
    return aborted;
  });
  if (outcome != Outcome::kArrived) return outcome;
  const MetadataParts parts = PartsOf(tokens);
  tile.ForEachRoute([&](int i, const Route& route) {
    const uint32_t packed = PackRoute(route.expert, route.position);
    const uint32_t weight = tokens.has_weights ? __float_as_uint(tokens.topk_weights[i]) : 0;
    ForEachDomainRank(call, domains, rank, [&](int to) {
      StorePacket(eager.At(to).packets() + (rank * call.num_assignments() + i),
                  packed | uint64_t{weight} << 32, eager.tag());
    });
#pragma unroll 1
    for (int j = 0; j < domains.num_rails(); ++j) {
      const PeerPointer<uint8_t> to = Rail(call, layout, j).Packed(0);
      StoreToPeer((to + parts.routes).As<uint32_t>() + i, packed);
      if (tokens.has_weights) StoreToPeer((to + parts.weights).As<uint32_t>() + i, weight);
    }
  });
  const int num_pairs = CountPairs(call.num_experts);
  const CountPacket* const counts = eager.Local().counts() + rank * num_pairs;
#pragma unroll 1
  for (int pair = role.Thread(); pair < num_pairs; pair += role.num_threads) {
    uint64_t data, tag;
    LoadRelaxedSystem(&counts[pair], &data, &tag);
#pragma unroll 1
    for (int j = 0; j < domains.num_rails(); ++j) {
      const PeerPointer<uint8_t> to = Rail(call, layout, j).Packed(0);
      StoreToPeer((to + kHeaderBytes).As<uint64_t>() + pair, data);
    }
  }
  role.Sync();
  const int index = role.Thread();
  if (index < domains.num_rails()) {
    const Rail rail(call, layout, index);
    PackHeader(call, rail, 0, parts.bytes, 0, false);
    rail.Put(0);
  }
  return Outcome::kArrived;
}

// Called by each counting warp. Passes its share of the counts of all ranks to `quotas`.
// EAGER_WAIT_COUNTS
__device__ Outcome CollectCounts(const HierarchicalLowLatencyDispatchParams& params,
                                 const RoleContext& role, const DomainEagerBuffers& eager,
                                 uint64_t sequence, Quotas* quotas) {
  const CallParams& call = params.dispatch.tokens.call;
  IncomingCounts counts(call, eager, role.BlockThreads());
  DomainSegmentWait wait(call, params.layout, sequence);
  while (true) {
    counts.Collect(quotas);
    if (!__any_sync(kFullWarp, !counts.IsComplete())) return Outcome::kArrived;
    const uint32_t missing = counts.MissingSource();
    if (missing >= static_cast<uint32_t>(call.num_ranks)) continue;  // it has arrived meanwhile
    const Outcome outcome = wait.Check(missing, false);
    if (outcome == Outcome::kArrived) continue;
    if (LaneIndex() == 0) RecordFailure(call, outcome);
    return outcome;
  }
}

// Called by the sending warps.
__device__ Outcome Send(const HierarchicalLowLatencyDispatchParams& params,
                        const DomainEagerBuffers& eager, uint64_t sequence) {
  const TokenParams& tokens = params.dispatch.tokens;
  const CallParams& call = tokens.call;
  const SegmentRoutingOfIds routing = {params.dispatch, PartsOf(tokens)};
  RowSender sender(tokens, params.layout, params.sizes, routing, eager, sequence);
  Outcome outcome = sender.SendOwn();
  const MetadataSpread spread(call, params.layout, eager, sequence, true, tokens.has_weights);
  const int num_spreads = spread.NumItems();
  const int num_items = num_spreads + sender.NumForwards();
#pragma unroll 1
  while (outcome == Outcome::kArrived) {
    const int item = NextWarpTicket(&call.control->progress.warp_tickets);
    if (item >= num_items) break;
    outcome = item < num_spreads ? spread.Run(item) : sender.Forward(item - num_spreads);
  }
  sender.FinishForwards();
  return outcome;
}

// Called by one warp. Stores a segment of a token to all of its rows.
__device__ Outcome ExpandSegment(const HierarchicalLowLatencyDispatchParams& params,
                                 const DomainEagerBuffers& eager, uint64_t sequence,
                                 const RowPlacement& placement, const ForwardedRoutes& forwarded,
                                 int index) {
  const TokenParams& tokens = params.dispatch.tokens;
  const CallParams& call = tokens.call;
  const RowSegments& segments = params.sizes.segments;
  const SegmentItem item = segments.Item(index, params.sizes.num_ranks_divmod);
  const int source = call.RankAfter(eager.rank(), 1 + item.peer);
  const int k = LaneIndex();
  const AssignmentPacket* const packet =
      &eager.Local().packets()[(source * call.num_tokens + item.token) * call.top_k + k];
  uint64_t packed = 0;
  const Outcome known = WaitForSegments(call, params.layout, sequence, [&] {  // WAIT_SEGMENT
    uint64_t tag = eager.tag();
    if (k < call.top_k) LoadRelaxedSystem(packet, &packed, &tag);
    return static_cast<uint32_t>(tag == eager.tag() ? kMaxRanks : source);
  });
  if (known != Outcome::kArrived) return known;
  Route routes[1] = {{-1, 0}};
  const auto route = static_cast<uint32_t>(packed);
  if (k < call.top_k) routes[0] = {ExpertOf(route), PositionOf(route)};
  const RowPlacement::PlacedToken<1> placed = placement.Place(source, routes);
  if (item.segment == 0) {
    forwarded.Write(source, item.token, placed);
    const int32_t row = placed.found.rows[0];
    if (tokens.has_weights && row >= 0) {
      tokens.row_weights[row] = __uint_as_float(static_cast<uint32_t>(packed >> 32));
    }
  }
  if (placed.found.assignments == 0) return Outcome::kArrived;
  const ReceivedSegment received(tokens, params.layout, params.sizes, eager, source, item.token,
                                 item.segment);
  const Outcome outcome = WaitForSegments(call, params.layout, sequence, [&] {
    return static_cast<uint32_t>(received.HasArrived() ? kMaxRanks : source);
  });
  if (outcome != Outcome::kArrived) return outcome;
  const RowSource from = received.Source();
  if (from.payload == nullptr) return Outcome::kArrived;
  SegmentCopy copy(segments, item.segment, call.result_vectors, call.num_scale_words);
  copy.Load(call, from);
#pragma unroll 1
  for (auto left = static_cast<uint32_t>(placed.found.assignments); left != 0; left &= left - 1) {
    const int32_t row = placed.found.Row(__ffs(left) - 1);
    copy.Store(RowAddress(tokens, row), RowScales(tokens, row));
  }
  return Outcome::kArrived;
}

// Called by all warps. Expands all segments, then fills the rows that come from no token, in a
// static order.
__device__ Outcome ExpandAndFill(const HierarchicalLowLatencyDispatchParams& params,
                                 const RoleContext& role, const DomainEagerBuffers& eager,
                                 uint64_t sequence, const Quotas& quotas) {
  const CallParams& call = params.dispatch.tokens.call;
  const PlanResults plan = quotas.PlanWithGroups(params.dispatch.plan);
  const RowPlacement placement(call, plan, quotas, eager.rank());
  const ForwardedRoutes forwarded(call, params.layout.domains, placement, params.forwarding);
  const int num_items = call.num_all_tokens() * params.sizes.segments.count();
  const int num_warps = role.NumGridWarps();
  int index = role.GridWarp();
#pragma unroll 1
  for (; index < num_items; index += num_warps) {
    const Outcome outcome = ExpandSegment(params, eager, sequence, placement, forwarded, index);
    if (outcome != Outcome::kArrived) return outcome;
  }
  const auto next_item = [&] {
    const int item = index - num_items;
    index += num_warps;
    return item;
  };
  const int32_t end = plan.row_offsets[call.num_local_experts];
  FillEmptyRows(params.dispatch.tokens, sequence, end, next_item, [&](int row) {
    if (!IsEmptyRow(call, plan, row)) return false;
    WriteRowSource(plan, row, -1, -1, -1, -1);
    params.forwarding.partial_sum_index[row] = -1;
    return true;
  });
  return Outcome::kArrived;
}

}  // namespace

__global__ void __launch_bounds__(kLowLatencyThreads, 1) HierarchicalLowLatencyDispatchKernel(
    const __grid_constant__ HierarchicalLowLatencyDispatchParams params) {
  const ProfileKernel profile(ProfiledKernel::kHierarchicalLowLatencyDispatch,
                              1u | 1u << (kLowLatencyThreads - kCountingThreads) / 32);
  constexpr int kSendThreads = kLowLatencyThreads - kCountingThreads;
  const TokenParams& tokens = params.dispatch.tokens;
  const CallParams& call = tokens.call;
  const Domains& domains = params.layout.domains;
  __shared__ RoleScratch scratch, counting_scratch;
  const RoleContext role = RoleContext::WholeBlock(&scratch);
  RoleContext counting = role.Part(kSendThreads, kCountingThreads, 1);
  counting.scratch = &counting_scratch;
  const uint64_t sequence = BeginCall(call, role);
  if (sequence == 0) {
    WriteSafeForwarding(call, domains, params.forwarding, role.GridThreads());
    return WriteSafeResults(tokens, params.dispatch.plan, Outcome::kConcurrent, role.GridThreads());
  }
  const DomainEagerBuffers eager(call, sequence,
                                 DomainEagerLayout(call, params.sizes.eager_offset));
  Quotas quotas(call, params.dispatch.row_align, eager.rank(),
                reinterpret_cast<int32_t*>(role.shared + TileCountBytes(call.num_experts)));
  auto outcome = Outcome::kArrived;  // this warp's
  if (HasWorkspace(call)) {
    if (role.Thread() < kSendThreads) {
      outcome = Send(params, eager, sequence);
    } else {
      if (NextTicket(&call.control->progress.block_tickets, counting) == 0) {
        outcome = CountAndTell(params, counting, eager, sequence);
      }
      if (outcome == Outcome::kArrived) {
        outcome = CollectCounts(params, counting, eager, sequence, &quotas);
      }
    }
    if (!__syncthreads_or(outcome != Outcome::kArrived)) {
      const IncomingCounts counts(call, eager, role.BlockThreads());
      quotas.Compute(role.BlockThreads(),
                     [&](int source, int expert) { return counts.Count(source, expert); });
      role.Sync();
      if (role.block == 0) quotas.WriteGroups(params.dispatch.plan, role.BlockThreads());
      outcome = ExpandAndFill(params, role, eager, sequence, quotas);
    }
  }
  FinishLowLatencyCall(call, params.layout, role, sequence, outcome, [&](Outcome failure) {
    WriteSafeForwarding(call, domains, params.forwarding, role.BlockThreads());
    WriteSafeResults(tokens, params.dispatch.plan, failure, role.BlockThreads());
  });
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

const void* HierarchicalLowLatencyDispatchKernelAddress() {
  return reinterpret_cast<const void*>(HierarchicalLowLatencyDispatchKernel);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
