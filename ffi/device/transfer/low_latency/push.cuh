// What small dispatches send: packets of choices to all ranks, pieces of tokens to those that they
// visit (small.h). By single warps.
#ifndef JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_PUSH_CUH_
#define JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_PUSH_CUH_

#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/protocol/work_items.cuh"
#include "ffi/device/transfer/low_latency/row_segments.cuh"
#include "ffi/device/transfer/token_params.h"

namespace jax_ep {

// Packets are handed out to warps in parts of 32 choices, one a lane.
JAX_EP_HOST_DEVICE constexpr int32_t NumPacketItems(int32_t num_assignments) {
  return CeilDivide(num_assignments, 32);
}

// Without weights they are 0; `expert_of(choice)` says the rest of a packet.
template <typename ExpertOf>
__device__ inline void PushPackets(const TokenParams& stage, const EagerBuffers& halves, int number,
                                   ExpertOf expert_of) {
  const Call& call = stage.call;
  const int rank = halves.rank();
  const int choice = 32 * number + threadIdx.x % 32;
  if (choice >= call.num_assignments()) return;
  const auto expert = static_cast<uint32_t>(expert_of(choice));
  const uint32_t weight =
      stage.topk_weights == nullptr ? 0 : __float_as_uint(stage.topk_weights[choice]);
#pragma unroll 1
  for (int i = 1; i <= call.num_ranks; ++i) {
    AssignmentPacket* const packets = halves.Of(call.RankAfter(rank, i)).packets();
    // SIGNAL_SEGMENT
    StoreRelaxedSystem(&packets[rank * call.num_assignments() + choice],
                       expert | uint64_t{weight} << 32, halves.tag());
  }
}

// A piece of a token to a peer, if `is_for(peer, choice)` of any of its choices. A peer that has no
// row of the token does not wait for the flag, so it may be left out; with `flags_all` it comes
// anyway.
template <typename IsFor>
__device__ inline void PushSegment(const TokenParams& stage, const EagerBuffers& halves,
                                   const RowSegments& pieces, const SegmentItem& part, IsFor is_for,
                                   bool flags_all, SegmentFlags* flags) {
  const Call& call = stage.call;
  const int rank = halves.rank();
  const int peer = call.RankAfter(rank, 1 + part.peer);
  const int lane = threadIdx.x % 32;
  const bool is_mine = lane < call.top_k && is_for(peer, part.token * call.top_k + lane);
  const uint4* const from =
      static_cast<const uint4*>(stage.x) + int64_t{part.token} * call.row_vectors;
  const int place = rank * call.num_tokens + part.token;
  uint4* const to = halves.Of(peer).rows() + int64_t{place} * call.row_vectors;
  SegmentCopy copy(pieces, part.piece, call.row_vectors);
  copy.Load(from);
  // Asked for after the loads, whose wait is the same.
  const bool visits = __any_sync(kFullWarp, is_mine);
  if (!visits && !flags_all) return;
  if (visits) copy.Store(to);
  flags->Add(&halves.Of(peer).flags()[place * pieces.count() + part.piece]);
}

// All that this rank sends. Nobody waits here for others, so each warp asks for its next part
// ahead. `stage`: that of a small dispatch, with or without a plan.
template <typename Stage, typename ExpertOf, typename IsFor>
__device__ inline void Push(const Stage& stage, const EagerBuffers& halves, uint64_t sequence,
                            int num_packet_parts, ExpertOf expert_of, IsFor is_for,
                            bool flags_all) {
  const TokenParams& tokens = stage.dispatch.tokens;
  const Call& call = tokens.call;
  const int num_pieces = (call.num_ranks - 1) * call.num_tokens * stage.pieces.count();
  const int num_parts = num_packet_parts + num_pieces;
  WarpTicketPrefetch tickets(&call.control->progress.warp_tickets);
  SegmentFlags flags(halves);
  InjectDelay(call, sequence, 4);
  if (!MayStoreToPeers(call)) return;
#pragma unroll 1
  for (int number; (number = tickets.Next()) < num_parts;) {
    if (number < num_packet_parts) {
      PushPackets(tokens, halves, number, expert_of);
    } else {
      const SegmentItem part = stage.pieces.At(number - num_packet_parts, stage.by_num_peers);
      PushSegment(tokens, halves, stage.pieces, part, is_for, flags_all, &flags);
    }
    // With the first part: peers that run another call shall know.
    if (number == 0) SignalEntry(call, sequence, false);
  }
  flags.Signal();
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_PUSH_CUH_
