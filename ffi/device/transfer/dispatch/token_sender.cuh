// The send warps of dispatch and redispatch. They store each token of this rank once to every peer
// that it goes to, into the peer's receive ring, chunk by chunk.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_TOKEN_SENDER_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_TOKEN_SENDER_CUH_

#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/protocol/work_items.cuh"
#include "ffi/device/transfer/dispatch/receivers.cuh"
#include "ffi/device/transfer/dispatch/row_copies.cuh"
#include "ffi/device/transfer/dispatch/send_order.cuh"
#include "ffi/device/transfer/dispatch/token_params.h"

namespace jax_ep {

// The roles of a dispatch in each block: expand warps, send warps, and all of them.
struct DispatchRoles {
  RoleContext all;
  RoleContext expand;
  RoleContext send;

  // Called once by all threads. The send warps wait here until the expand warps have finished their
  // prologue items: the fence of such an item would wait for all stores in flight from this SM.
  __device__ void ReleaseSenders() const {
    const ProfileSpan span(SpanKind::kWaitRole);
    all.Sync();
  }
};

// Returns the roles in a kernel that has no others: num_expand_threads threads of each block
// expand.
__device__ inline DispatchRoles SplitBlock(RoleScratch* scratch, int num_expand_threads,
                                           int num_send_warps) {
  const RoleContext all = RoleContext::WholeBlock(scratch);
  return {all, all.Part(0, num_expand_threads, 1),
          all.Part(num_expand_threads, 32 * num_send_warps, 2)};
}

// Returns the offset in kReceivedRows, in vectors, of the slot for what the rank `distance` after
// the receiver sends at `position`.
__device__ inline int64_t SlotOffset(const TokenParams& params, int distance, int position) {
  const int64_t slots = params.chunks.ring_slots;
  const int slot = params.ring_slots_divmod.Remainder(position);
  return ((distance - 1) * slots + slot) * params.call.wire_vectors;
}

// Returns the number of tokens of a chunk.
__device__ inline int ChunkTokens(const TokenParams& params, int chunk) {
  return min(params.chunks.tokens, params.call.num_tokens - chunk * params.chunks.tokens);
}

// Called by a thread group after WaitForEntry. Sends range `item` of `num_items` of this rank's
// weights to the receivers besides this rank.
template <typename Receivers = AllRanks>
__device__ inline void SendWeights(const TokenParams& params, int64_t item, int64_t num_items,
                                   const ThreadGroup& threads, const Receivers& receivers = {}) {
  const CallParams& call = params.call;
  if (!params.has_weights) return;
  const int rank = call.control->rank;
  const int64_t assignments = call.num_assignments();
  const int64_t end = assignments * (item + 1) / num_items;
#pragma unroll 1
  for (int64_t i = assignments * item / num_items + threads.index; i < end; i += threads.size) {
    const float weight = params.topk_weights[i];
#pragma unroll 1
    for (int distance = 1; distance < receivers.count(call); ++distance) {
      const int peer = receivers.After(call, rank, distance);
      StoreToPeer(PeerBuffer<float>(call, peer, kReceivedWeights) + (rank * assignments + i),
                  weight);
    }
  }
}

// Used by a send warp, which sends one token at a time, in `Order` (send_order.cuh).
template <typename Order>
class TokenSender {
 public:
  __device__ TokenSender(const TokenParams& params, const Order& order, const RoleContext& role,
                         uint64_t sequence)
      : params_(params),
        order_(order),
        sequence_(sequence),
        copies_(params.send_pipeline, role, params.call, nullptr) {}

  // Called after WaitForEntry. destination_of(assignment) returns the rank that an assignment goes
  // to, or -1. If `to_all`, all tokens go to all ranks instead.
  template <typename DestinationOf>
  __device__ Outcome Run(bool to_all, DestinationOf destination_of) {
    const CallParams& call = params_.call;
    const int rank = call.control->rank;
    const int num_peers = call.num_ranks - 1;
    const int lane = LaneIndex();
    if (num_peers == 0) return Outcome::kArrived;
    const ProfileSpan span(SpanKind::kSend);
    WarpTicketPrefetch tickets(&call.control->progress.send_tickets);
    Destinations next_destinations;
    const auto load = [&](int position) {
      next_destinations = {};
      for (int i = 0; i < 2; ++i) {
        const int k = lane + 32 * i;
        if (position >= call.num_tokens || k >= call.top_k) continue;
        const int32_t to = destination_of(order_.Token(rank, position) * call.top_k + k);
        if (to >= 0 && to != rank) next_destinations.Set(i, call, to);
      }
    };
    // Sends a token to the destinations of the lanes that are in `lanes`, as RowCopies::Add.
    const auto send = [&](int position, uint64_t lanes, const Destinations& destinations) {
      PeerPointer<uint4> slots[2] = {};
      for (int i = 0; i < 2; ++i) {
        if (!(lanes >> (lane + 32 * i) & 1)) continue;
        const int difference = rank - destinations.ranks[i];
        const int distance = difference < 0 ? difference + call.num_ranks : difference;
        slots[i] = destinations.received_rows[i] + SlotOffset(params_, distance, position);
      }
      copies_.Add(OperandRow(params_, order_.Token(rank, position)), lanes, slots, {});
    };
    const int ring_chunks = params_.chunks.ring_chunks;
    int num_chunks = ring_chunks;  // chunks that have slots
    copies_.Begin();
    int next = tickets.Next();
    load(next);
#pragma unroll 1
    while (next < call.num_tokens) {
      const int position = next;
      const uint64_t firsts = to_all ? 0 : FirstAssignments(next_destinations.ranks);
      const int chunk = params_.chunk_tokens_divmod.Quotient(position);
      if (chunk >= num_chunks) {
        // WAIT_CREDIT
        const Outcome outcome =
            WaitForChunk(call, WaitPoint::kCredit, chunk - ring_chunks, sequence_);
        if (outcome != Outcome::kArrived) return outcome;
        num_chunks = chunk + 1;
        copies_.Begin();
      }
      if (firsts != 0) send(position, firsts, next_destinations);
      if (to_all) SendToAll(position, send);
      // While the row is in flight: it takes several loads, one after another.
      next = tickets.Next();
      load(next);
      if (firsts != 0 || to_all) copies_.Finish();
      FinishToken(chunk);
    }
    return Outcome::kArrived;
  }

 private:
  // Up to two ranks that a token goes to, per lane, and their receive rings.
  struct Destinations {
    __device__ void Set(int i, const CallParams& call, int rank) {
      ranks[i] = rank;
      received_rows[i] = PeerBuffer<uint4>(call, rank, kReceivedRows);
    }

    int32_t ranks[2] = {-1, -1};
    PeerPointer<uint4> received_rows[2] = {};
  };

  template <typename Send>
  __device__ void SendToAll(int position, Send send) {
    const CallParams& call = params_.call;
#pragma unroll 1
    for (int first = 1; first < call.num_ranks; first += 64) {
      Destinations destinations;
      uint64_t lanes = 0;
      for (int i = 0; i < 2; ++i) {
        const int distance = first + LaneIndex() + 32 * i;
        const int rank = call.RankAfter(call.control->rank, min(distance, call.num_ranks));
        destinations.Set(i, call, rank);
        lanes |= uint64_t{__ballot_sync(kFullWarp, distance < call.num_ranks)} << (32 * i);
      }
      send(position, lanes, destinations);
    }
  }

  // Counts a token whose stores are complete. The last token of a chunk signals the peers.
  __device__ void FinishToken(int chunk) {
    const CallParams& call = params_.call;
    Progress& progress = call.control->progress;
    bool is_last = false;
    if (LaneIndex() == 0) {
      const uint32_t before = AddAcquireReleaseDevice(&progress.chunk_items_finished[0][chunk], 1);
      is_last = before + 1 == static_cast<uint32_t>(ChunkTokens(params_, chunk));
      // The signal also covers this rank's counts, routes and weights.
      if (is_last) WaitForItems(&progress.items_finished, call.num_prologue_items);
    }
    SignalChunkIfLast(call, is_last, WaitPoint::kChunk, chunk, sequence_, 4);  // SIGNAL_CHUNK
  }

  const TokenParams& params_;
  const Order order_;
  const uint64_t sequence_;
  RowCopies copies_;
};

// Called by the send warps.
template <typename Order, typename DestinationOf>
__device__ inline Outcome SendTokens(const TokenParams& params, const Order& order,
                                     const DispatchRoles& roles, uint64_t sequence, bool to_all,
                                     DestinationOf destination_of) {
  // The first warps to ask are the senders, because these are surely running.
  const int sender = NextWarpTicket(&params.call.control->progress.sender_tickets);
  TokenSender sends(params, order, roles.send, sequence);
  InjectDelay(params.call, sequence, 5);
  const Outcome outcome = WaitForEntry(params.call, sequence);
  roles.ReleaseSenders();
  if (outcome != Outcome::kArrived || sender >= params.num_senders) return outcome;
  return sends.Run(to_all, destination_of);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_TOKEN_SENDER_CUH_
