// The sends of low-latency dispatch and redispatch: packets of assignments to all ranks, and
// segments of tokens to the ranks that they go to. Each warp sends for itself.
#ifndef JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_PUSH_CUH_
#define JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_PUSH_CUH_

#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/transfer/dispatch/token_params.h"
#include "ffi/device/transfer/low_latency/row_segments.cuh"

namespace jax_ep {

// A packet item has 32 assignments, one per lane.
JAX_EP_HOST_DEVICE constexpr int32_t NumPacketItems(int32_t num_assignments) {
  return CeilDivide(num_assignments, 32);
}

// Sends one packet item to all ranks. expert_of(assignment) returns the packet's expert; weights
// are 0 if there are none.
template <typename ExpertOf>
__device__ inline void PushPackets(const TokenParams& params, const EagerBuffers& eager, int item,
                                   ExpertOf expert_of) {
  const CallParams& call = params.call;
  const int rank = eager.rank();
  const int assignment = 32 * item + LaneIndex();
  if (assignment >= call.num_assignments()) return;
  const auto expert = static_cast<uint32_t>(expert_of(assignment));
  const uint32_t weight =
      params.topk_weights == nullptr ? 0 : __float_as_uint(params.topk_weights[assignment]);
#pragma unroll 1
  for (int i = 1; i <= call.num_ranks; ++i) {
    const PeerPointer<AssignmentPacket> packets = eager.At(call.RankAfter(rank, i)).packets();
    StorePacket(packets + (rank * call.num_assignments() + assignment),
                expert | uint64_t{weight} << 32, eager.tag());
  }
}

// Sends a segment of a token to a peer, if is_for(peer, assignment) for any of its assignments. A
// peer without a row of the token does not wait for the flag; with `flags_all` it gets the flag,
// too.
template <typename IsFor>
__device__ inline void PushSegment(const TokenParams& params, const EagerBuffers& eager,
                                   const RowSegments& segments, const SegmentItem& item,
                                   IsFor is_for, bool flags_all, SegmentFlags* flags) {
  const CallParams& call = params.call;
  const int rank = eager.rank();
  const int peer = call.RankAfter(rank, 1 + item.peer);
  const int lane = LaneIndex();
  const bool is_for_peer = lane < call.top_k && is_for(peer, item.token * call.top_k + lane);
  const RowSource from = OperandRow(params, item.token);
  const int row = rank * call.num_tokens + item.token;
  const PeerPointer<uint4> to = eager.At(peer).rows() + int64_t{row} * call.wire_vectors;
  SegmentCopy copy(segments, item.segment, call.operand_vectors, call.num_scale_words);
  copy.Load(call, from);
  // After the loads, so that both latencies overlap.
  const bool is_sent = __any_sync(kFullWarp, is_for_peer);
  if (!is_sent && !flags_all) return;
  if (is_sent) copy.Store(to, ScalesInFlight(call, to));
  flags->Add(eager.At(peer).flags() + (row * segments.count() + item.segment));
}

// Sends everything of this rank. No item waits for another one, so tickets are prefetched. `Params`
// is LowLatencyDispatchParams or LowLatencyRedispatchParams.
template <typename Params, typename ExpertOf, typename IsFor>
__device__ inline void Push(const Params& params, const EagerBuffers& eager, uint64_t sequence,
                            SenderStart& start, int num_packet_items, ExpertOf expert_of,
                            IsFor is_for, bool flags_all) {
  const ProfileSpan span(SpanKind::kSend);
  const TokenParams& tokens = params.dispatch.tokens;
  const CallParams& call = tokens.call;
  const int num_segment_items = (call.num_ranks - 1) * call.num_tokens * params.segments.count();
  const int num_items = num_packet_items + num_segment_items;
  SegmentFlags flags(eager);
  InjectDelay(call, sequence, 4);
  if (!start.MayStoreToPeers()) return;
#pragma unroll 1
  for (int item; (item = start.tickets.Next()) < num_items;) {
    if (item < num_packet_items) {
      PushPackets(tokens, eager, item, expert_of);
    } else {
      const SegmentItem segment =
          params.segments.Item(item - num_packet_items, params.num_peers_divmod);
      PushSegment(tokens, eager, params.segments, segment, is_for, flags_all, &flags);
    }
    // With the first item: peers that run another call detect the mismatch.
    if (item == 0) SignalEntry(call, sequence, false);
  }
  flags.Signal();
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_PUSH_CUH_
