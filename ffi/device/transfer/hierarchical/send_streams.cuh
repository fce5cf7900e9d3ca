// The send warps of dispatch and redispatch: this rank's tokens go to its rail partners and to its
// domain, and what the partners have sent goes on to its domain.
//
//   rail      a chunk's tokens that the partner's domain needs are packed into a message
//   domain    a chunk's tokens go to the slots of those ranks of the domain that need them
//   forward   likewise, the tokens of a message that has arrived from a partner
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_SEND_STREAMS_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_SEND_STREAMS_CUH_

#include "ffi/device/transfer/dispatch/row_copies.cuh"
#include "ffi/device/transfer/hierarchical/chunks.cuh"
#include "ffi/device/transfer/hierarchical/metadata.cuh"
#include "ffi/device/transfer/hierarchical/streams.cuh"

namespace jax_ep {

// The scratch of a role of a call over several domains.
struct HierarchicalScratch {
  RoleScratch role;
  StreamItem item;
};

// Whether this rank's work items before the exchange are finished. Acquire.
__device__ inline bool HasFinishedPrologue(const CallParams& call) {
  return AreItemsFinished(&call.control->progress.items_finished, call.num_prologue_items);
}

// A ring in a receiver's kReceivedRows, by the tokens' source. A slot has room for all tokens of a
// chunk, at their places.
__device__ inline int64_t RingOffset(const CallParams& call, const HierarchicalLayout& layout,
                                     int receiver, int source, int slot) {
  const Domains& domains = layout.domains;
  const int distance = domains.Index(source) - domains.Index(receiver);
  const int neighbor = (distance > 0 ? distance : distance + domains.size) - 1;
  const int64_t ring = int64_t{neighbor} * domains.count + domains.Domain(source);
  return (ring * layout.domain_slots + slot) * layout.chunk_tokens * call.wire_vectors;
}

// Called by one thread. Counts one of the two reads of a message that is forwarded and expanded.
// The second one returns the credit.
__device__ inline void FinishRead(const CallParams& call, const HierarchicalLayout& layout,
                                  const Rail& rail, int message) {
  if (layout.domains.size > 1) {
    uint32_t* const reads = &call.control->hierarchical.slot_reads[rail.ReceivedSlot(message)];
    // Relaxed is enough: only loads precede it, whose values have arrived.
    if (atomicAdd(reads, 1u) == 0) return;
    atomicExch(reads, 0u);
  }
  rail.ReturnCredit(message);
}

// `Routing` knows where tokens go:
//   Own(assignment)   the rank that an assignment of this rank goes to, or -1
//   to_all            whether all of this rank's tokens go everywhere instead
//   NumBatches()      the batches of 64 ranks of this domain
//   Forwarded(rail, token, batch, ranks)   called by one warp: finds the ranks of a batch that a
//                     partner's token goes to, two per lane, -1 for none
template <typename Routing>
class SendStreams {
 public:
  __device__ SendStreams(const TokenParams& params, const HierarchicalLayout& layout,
                         const Routing& routing, const RoleContext& role, uint64_t sequence)
      : params_(params),
        layout_(layout),
        routing_(routing),
        role_(role),
        sequence_(sequence),
        rank_(params.call.control->rank),
        copies_(params.send_pipeline, role, params.call, nullptr) {}

  __device__ int count() const {
    const int rails = layout_.domains.num_rails();
    return layout_.domains.size > 1 ? 2 * rails + 1 : rails;
  }
  __device__ int First(int block) const { return block % count(); }
  __device__ int NumItems(int /*stream*/) const { return layout_.num_chunks; }

  __device__ bool IsReady(int stream, int chunk) const {
    const CallParams& call = params_.call;
    const int message = layout_.num_metadata + chunk;
    if (IsRail(stream)) return RailOf(stream).MayPack(message);
    if (IsForward(stream)) {
      const Rail rail = RailOf(stream);
      return rail.HasArrived(message) && HasMetadata(call, layout_, RailIndex(stream)) &&
             HasCredits(rail.partner(), chunk);
    }
    // The chunk's flag covers this rank's routes and weights, too.
    return HasFinishedPrologue(call) && HasCredits(rank_, chunk);
  }

  __device__ int Peer(int stream, int chunk) const {
    if (IsRail(stream)) return RailOf(stream).partner();
    const int source = IsForward(stream) ? RailOf(stream).partner() : rank_;
    const int missing = MissingCredit(source, chunk);
    return missing >= 0 ? missing : source;
  }
  __device__ bool HasEntered() const { return HasAllMetadata(params_.call, layout_); }

  __device__ void Run(int stream, int chunk) {
    copies_.Begin();
    if (IsRail(stream)) {
      Pack(RailOf(stream), chunk);
    } else if (IsForward(stream)) {
      Forward(RailOf(stream), chunk);
    } else {
      SendToDomain(chunk);
    }
    copies_.StoreAll();
  }

  __device__ SpanKind SpanOf(int stream) const {
    if (IsRail(stream)) return SpanKind::kPackMessage;
    return IsForward(stream) ? SpanKind::kForward : SpanKind::kSend;
  }

  // Signals when the item's stores are complete.
  __device__ void Complete(int stream, int chunk) {
    copies_.Finish();
    role_.Sync();
    const int message = layout_.num_metadata + chunk;
    if (role_.Warp() == 0) InjectDelayOfItem(params_.call, sequence_, 4, chunk);
    if (IsRail(stream)) {
      if (role_.Thread() == 0) RailOf(stream).Put(message);
    } else if (IsForward(stream)) {
      const Rail rail = RailOf(stream);
      SignalChunk(rail.partner(), chunk);
      if (role_.Thread() == 0) FinishRead(params_.call, layout_, rail, message);
    } else {
      SignalChunk(rank_, chunk);
    }
  }

 private:
  __device__ bool IsRail(int stream) const { return stream < layout_.domains.num_rails(); }
  __device__ bool IsForward(int stream) const { return stream > layout_.domains.num_rails(); }
  __device__ int RailIndex(int stream) const {
    return IsRail(stream) ? stream : stream - layout_.domains.num_rails() - 1;
  }
  __device__ Rail RailOf(int stream) const { return {params_.call, layout_, RailIndex(stream)}; }

  // Returns a rank of the domain that has not returned the credit for a source's chunk, or -1.
  // Credits come by source domain and receiver.
  __device__ int MissingCredit(int source, int chunk) const {
    const DomainSlot slot(layout_, sequence_, chunk);
    const Domains& domains = layout_.domains;
    if (slot.lap == 0) return -1;
    const DomainRanks ranks = {&domains};
#pragma unroll 1
    for (int i = 1; i < domains.size; ++i) {
      const int receiver = ranks.After(params_.call, rank_, i);
      if (!HasCredit(params_.call, domains.Partner(receiver, source), slot)) return receiver;
    }
    return -1;
  }
  __device__ bool HasCredits(int source, int chunk) const {
    return MissingCredit(source, chunk) < 0;
  }

  // Returns whether a domain needs a token of this rank.
  __device__ bool IsNeeded(int domain, int token) const {
    const CallParams& call = params_.call;
    bool is_needed = routing_.to_all;
#pragma unroll 4
    for (int k = 0; k < call.top_k; ++k) {
      const int to = routing_.Own(token * call.top_k + k);
      is_needed |= to >= 0 && layout_.domains.Domain(to) == domain;
    }
    return is_needed;
  }

  __device__ void Pack(const Rail& rail, int chunk) {
    const CallParams& call = params_.call;
    const int message = layout_.num_metadata + chunk;
    const uint64_t tokens = TokensWhere(call, layout_, chunk,
                                        [&](int token) { return IsNeeded(rail.domain(), token); });
    const int64_t row_bytes = int64_t{call.wire_vectors} * sizeof(uint4);
    if (role_.Thread() == 0) {
      PackHeader(call, rail, message, kHeaderBytes + __popcll(tokens) * row_bytes, tokens, false);
    }
    const PeerPointer<uint4> rows = (rail.Packed(message) + kHeaderBytes).As<uint4>();
    ForEachTokenOfWarp(chunk, [&](int index, int token) {
      if (!IsIn(tokens, index)) return;
      PeerPointer<uint4> to[2] = {PeerPointer<uint4>(nullptr), PeerPointer<uint4>(nullptr)};
      if (LaneIndex() == 0) to[0] = rows + int64_t{RowIn(tokens, index)} * call.wire_vectors;
      copies_.Add(OperandRow(params_, token), 1, to, {});
    });
  }

  // Calls use(index, token) for this warp's tokens of a chunk.
  template <typename Use>
  __device__ void ForEachTokenOfWarp(int chunk, Use use) const {
    ForEachToken(params_.call, layout_, chunk, role_.Warp(), role_.NumWarps(), use);
  }

  // Sends a token of a source to the ranks in the lanes, once to each.
  __device__ void SendToRanks(const RowSource& from, int source, int slot, int index,
                              const int32_t (&ranks)[2]) {
    const CallParams& call = params_.call;
    const uint64_t firsts = FirstAssignments(ranks);
    if (firsts == 0) return;
    PeerPointer<uint4> to[2] = {PeerPointer<uint4>(nullptr), PeerPointer<uint4>(nullptr)};
    for (int i = 0; i < 2; ++i) {
      if (!(firsts >> (LaneIndex() + 32 * i) & 1)) continue;
      to[i] =
          PeerBuffer<uint4>(call, ranks[i], kReceivedRows) +
          (RingOffset(call, layout_, ranks[i], source, slot) + int64_t{index} * call.wire_vectors);
    }
    copies_.Add(from, firsts, to, {});
  }

  // The other ranks of the domain, in batches of 64.
  __device__ void Neighbors(int first, int32_t (&ranks)[2]) const {
    const DomainRanks all = {&layout_.domains};
    for (int i = 0; i < 2; ++i) {
      const int distance = 1 + first + LaneIndex() + 32 * i;
      ranks[i] = distance < layout_.domains.size ? all.After(params_.call, rank_, distance) : -1;
    }
  }

  __device__ void SendToDomain(int chunk) {
    const CallParams& call = params_.call;
    const Domains& domains = layout_.domains;
    const DomainSlot slot(layout_, sequence_, chunk);
    ForEachTokenOfWarp(chunk, [&](int index, int token) {
      const RowSource from = OperandRow(params_, token);
      int32_t ranks[2] = {-1, -1};
      if (routing_.to_all) {
#pragma unroll 1
        for (int first = 0; first < domains.size - 1; first += 64) {
          Neighbors(first, ranks);
          SendToRanks(from, rank_, slot.slot, index, ranks);
        }
        return;
      }
      for (int i = 0; i < 2; ++i) {
        const int k = LaneIndex() + 32 * i;
        if (k < call.top_k) ranks[i] = Neighbor(routing_.Own(token * call.top_k + k));
      }
      SendToRanks(from, rank_, slot.slot, index, ranks);
    });
  }

  __device__ void Forward(const Rail& rail, int chunk) {
    const CallParams& call = params_.call;
    const DomainSlot slot(layout_, sequence_, chunk);
    const int message = layout_.num_metadata + chunk;
    const uint64_t tokens = LoadRelaxedSystem(&rail.Header(message).tokens);
    const auto* const rows = reinterpret_cast<const uint4*>(rail.Received(message) + kHeaderBytes);
    ForEachTokenOfWarp(chunk, [&](int index, int token) {
      if (!IsIn(tokens, index)) return;
      const RowSource from = {rows + int64_t{RowIn(tokens, index)} * call.wire_vectors};
#pragma unroll 1
      for (int batch = 0; batch < routing_.NumBatches(); ++batch) {
        int32_t ranks[2];
        routing_.Forwarded(rail, token, batch, ranks);
        for (int32_t& to : ranks) to = Neighbor(to);
        SendToRanks(from, rail.partner(), slot.slot, index, ranks);
      }
    });
  }

  // Returns `to` if it is another rank of this domain, otherwise -1.
  __device__ int Neighbor(int to) const {
    const bool is_neighbor =
        to >= 0 && to != rank_ && layout_.domains.Domain(to) == layout_.domains.Domain(rank_);
    return is_neighbor ? to : -1;
  }

  // Called by the role. Signals a chunk of a source to the other ranks of the domain.
  __device__ void SignalChunk(int source, int chunk) const {
    if (role_.Warp() != 0) return;
    const CallParams& call = params_.call;
    const DomainSlot slot(layout_, sequence_, chunk);
    ForEachNeighbor(call, layout_.domains, [&](int peer) {  // SIGNAL_CHUNK
      StoreDomainFlag(call.control, peer, DomainFlag::kChunk, source, slot.slot, slot.number);
    });
  }

  const TokenParams& params_;
  const HierarchicalLayout& layout_;
  const Routing& routing_;
  const RoleContext& role_;
  const uint64_t sequence_;
  const int rank_;
  RowCopies copies_;
};

// Called by the send warps. The first blocks to ask are the senders, because these surely run. Some
// of them have items before the exchange, and begin late. That leaves links to the metadata.
template <typename Routing>
__device__ inline Outcome SendChunks(const TokenParams& params, const HierarchicalLayout& layout,
                                     const Routing& routing, const DispatchRoles& roles,
                                     uint64_t sequence, int num_blocks, StreamItem* scratch) {
  const CallParams& call = params.call;
  const int sender = NextTicket(&call.control->progress.sender_tickets, roles.send);
  SendStreams<Routing> streams(params, layout, routing, roles.send, sequence);
  const Outcome outcome = WaitForDomainEntry(call, layout.domains, sequence, roles.send);
  roles.ReleaseSenders();
  if (outcome != Outcome::kArrived || sender >= num_blocks) return outcome;
  return RunStreams(call, roles.send, streams, &call.control->hierarchical.send_claims, sequence,
                    scratch);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_SEND_STREAMS_CUH_
