// How rows travel in low-latency dispatch and redispatch over several domains. All warps take
// segments of this rank's tokens, and pack them into messages or store them to the domain. Then
// they take what partners have sent, and store that to the domain.
//
// `Routing` tells where tokens go: Own(assignment), the rank of one of this rank's assignments or
// -1; to_all, if they go to all ranks instead; flags_all, whether a receiver waits for tokens that
// do not go there, too; and Forwarded(rail, token), called by one warp, whose result r says by
// r.GoesTo(rank) whether a partner's token goes to a rank of this domain.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_SEND_ROWS_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_SEND_ROWS_CUH_

#include "ffi/device/protocol/work_items.cuh"
#include "ffi/device/transfer/dispatch/row_source.cuh"
#include "ffi/device/transfer/hierarchical/low_latency/packing.cuh"

namespace jax_ep {

template <typename Routing>
class RowSender {
 public:
  __device__ RowSender(const TokenParams& params, const HierarchicalLayout& layout,
                       const HierarchicalSegments& sizes, const Routing& routing,
                       const DomainEagerBuffers& eager, uint64_t sequence)
      : params_(params),
        call_(params.call),
        layout_(layout),
        domains_(layout.domains),
        sizes_(sizes),
        routing_(routing),
        eager_(eager),
        sequence_(sequence),
        rank_(eager.rank()),
        packed_(params.call, layout, sizes, kHeaderBytes),
        flags_(eager) {}

  // Called by all sending warps. No item waits for another one, so tickets are prefetched. Messages
  // come first, as they have the longest way.
  __device__ Outcome SendOwn() {
    const int num_packed = domains_.num_rails() * NumSegments();
    const int num_items = num_packed + (domains_.size - 1) * NumSegments();
    InjectDelay(call_, sequence_, 4);
    // The next wait finds the abort. EAGER_CHECK_ABORT
    if (!MayStoreToPeers(call_)) return Outcome::kArrived;
    WarpTicketPrefetch tickets(&call_.control->progress.low_latency_tickets);
#pragma unroll 1
    for (int item; (item = tickets.Next()) < num_items;) {
      if (item < num_packed) {
        const Outcome outcome = Pack(sizes_.segments.Item(item, sizes_.num_rails_divmod));
        if (outcome != Outcome::kArrived) return outcome;
      } else {
        packed_.Count();
        Push(sizes_.segments.Item(item - num_packed, sizes_.num_neighbors_divmod));
      }
    }
    packed_.Count();
    flags_.Signal();
    return Outcome::kArrived;
  }

  __device__ int NumForwards() const {
    return domains_.size > 1 ? domains_.num_rails() * NumSegments() : 0;
  }

  // Called by one warp. Sends a partner's segment on; followed by FinishForwards.
  __device__ Outcome Forward(int index) {
    const SegmentItem item = sizes_.segments.Item(index, sizes_.num_rails_divmod);
    const Rail rail(call_, layout_, item.peer);
    const int message = HierarchicalSegments::MessageOf(sizes_.Chunk(item.token));
    const auto has_arrived = [&] { return rail.HasArrived(0) && rail.HasArrived(message); };
    if (__any_sync(kFullWarp, !has_arrived())) {
      flags_.Signal();  // others wait for them
      const Outcome outcome = WaitForSegments(call_, layout_, sequence_, [&] {
        return static_cast<uint32_t>(has_arrived() ? kMaxRanks : rail.partner());
      });
      if (outcome != Outcome::kArrived) return outcome;
    }
    const ReceivedRow from(sizes_, rail, item.token);
    SegmentCopy copy(sizes_.segments, item.segment, from.is_there ? call_.operand_vectors : 0,
                     from.is_there ? call_.num_scale_words : 0);
    copy.Load(call_, {from.Vectors(call_, kHeaderBytes)});
    const auto routes = routing_.Forwarded(rail, item.token);
#pragma unroll 1
    for (int i = 1; i < domains_.size; ++i) {
      const int to = DomainRanks{&domains_}.After(call_, rank_, i);
      Store(copy, to, rail.partner(), item, from.is_there && routes.GoesTo(to));
    }
    return Outcome::kArrived;
  }
  __device__ void FinishForwards() { flags_.Signal(); }

 private:
  __device__ int NumSegments() const { return call_.num_tokens * sizes_.segments.count(); }

  // Called by one warp. Returns the tokens of a chunk that go to a domain.
  __device__ uint64_t TokensTo(int domain, int chunk) const {
    return TokensWhere(call_, layout_, chunk, [&](int token) {
      bool goes = routing_.to_all;
#pragma unroll 4
      for (int k = 0; k < call_.top_k; ++k) {
        const int to = routing_.Own(token * call_.top_k + k);
        goes |= to >= 0 && domains_.Domain(to) == domain;
      }
      return goes;
    });
  }

  __device__ Outcome Pack(const SegmentItem& item) {
    const Rail rail(call_, layout_, item.peer);
    const int chunk = sizes_.Chunk(item.token);
    const int message = HierarchicalSegments::MessageOf(chunk);
    const RowSource from = OperandRow(params_, item.token);
    SegmentCopy copy(sizes_.segments, item.segment, call_.operand_vectors, call_.num_scale_words);
    copy.Load(call_, from);
    // After the loads, so that the latencies overlap.
    const uint64_t tokens = TokensTo(rail.domain(), chunk);
    const Outcome outcome = WaitForCredit(call_, layout_, sequence_, rail, message);
    if (outcome != Outcome::kArrived) return outcome;
    const int index = sizes_.IndexInChunk(item.token);
    if (IsIn(tokens, index)) {
      const PeerPointer<uint4> to = (rail.Packed(message) + kHeaderBytes).template As<uint4>() +
                                    int64_t{RowIn(tokens, index)} * call_.wire_vectors;
      copy.Store(to, ScalesInFlight(call_, to));
    }
    packed_.Add(item.peer, chunk, tokens);
    return Outcome::kArrived;
  }

  __device__ void Push(const SegmentItem& item) {
    const int to = DomainRanks{&domains_}.After(call_, rank_, 1 + item.peer);
    const int k = LaneIndex();
    const bool goes =
        routing_.to_all || (k < call_.top_k && routing_.Own(item.token * call_.top_k + k) == to);
    const RowSource from = OperandRow(params_, item.token);
    SegmentCopy copy(sizes_.segments, item.segment, call_.operand_vectors, call_.num_scale_words);
    copy.Load(call_, from);
    Store(copy, to, rank_, item, __any_sync(kFullWarp, goes));
  }

  // Stores a segment of a source's token to a rank of this domain, if it goes there.
  __device__ void Store(const SegmentCopy& copy, int to, int source, const SegmentItem& item,
                        bool goes) {
    if (!goes && !routing_.flags_all) return;
    const int row = source * call_.num_tokens + item.token;
    if (goes) {
      const PeerPointer<uint4> vectors = eager_.At(to).rows() + int64_t{row} * call_.wire_vectors;
      copy.Store(vectors, ScalesInFlight(call_, vectors));
    }
    flags_.Add(eager_.At(to).flags() + (row * sizes_.segments.count() + item.segment));
  }

  const TokenParams& params_;
  const CallParams& call_;
  const HierarchicalLayout& layout_;
  const Domains& domains_;
  const HierarchicalSegments& sizes_;
  const Routing& routing_;
  const DomainEagerBuffers& eager_;
  const uint64_t sequence_;
  const int rank_;
  PackedSegments packed_;
  SegmentFlags flags_;
};

// A segment of a source's token on this rank: among the operands, in a partner's message, or where
// a rank of the domain stores it.
class ReceivedSegment {
 public:
  __device__ ReceivedSegment(const TokenParams& params, const HierarchicalLayout& layout,
                             const HierarchicalSegments& sizes, const DomainEagerBuffers& eager,
                             int source, int token, int segment)
      : params_(params),
        layout_(layout),
        sizes_(sizes),
        eager_(eager),
        source_(source),
        token_(token),
        segment_(segment) {}

  // Acquire. EAGER_WAIT_SEGMENT
  __device__ bool HasArrived() const {
    if (source_ == eager_.rank()) return true;
    if (IsOfPartner()) {
      return RailOf().HasArrived(HierarchicalSegments::MessageOf(sizes_.Chunk(token_)));
    }
    const uint64_t* const flags = eager_.Local().flags();  // WAIT_SEGMENT
    return LoadAcquireSystem(&flags[Row() * sizes_.segments.count() + segment_]) == eager_.tag();
  }

  // Returns the token's row, once it has arrived. Null if the partner's message does not have it.
  __device__ RowSource Source() const {
    const CallParams& call = params_.call;
    if (source_ == eager_.rank()) return OperandRow(params_, token_);
    if (IsOfPartner()) {
      const ReceivedRow row(sizes_, RailOf(), token_);
      return {row.is_there ? row.Vectors(call, kHeaderBytes) : nullptr};
    }
    return {eager_.Local().rows() + int64_t{Row()} * call.wire_vectors};
  }

 private:
  __device__ bool IsOfPartner() const {
    return layout_.domains.ArePartners(eager_.rank(), source_);
  }
  __device__ Rail RailOf() const {
    const Domains& domains = layout_.domains;
    return {params_.call, layout_,
            domains.Rail(domains.Domain(eager_.rank()), domains.Domain(source_))};
  }
  __device__ int Row() const { return source_ * params_.call.num_tokens + token_; }

  const TokenParams& params_;
  const HierarchicalLayout& layout_;
  const HierarchicalSegments& sizes_;
  const DomainEagerBuffers& eager_;
  const int source_;
  const int token_;
  const int segment_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_SEND_ROWS_CUH_
