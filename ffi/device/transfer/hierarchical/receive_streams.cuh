// The expand warps of dispatch and redispatch: tokens become rows. There is a stream for the tokens
// of each rank: this rank's own, those that rail partners send here, and those that other ranks of
// the domain send on or send themselves.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_RECEIVE_STREAMS_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_RECEIVE_STREAMS_CUH_

#include "ffi/device/transfer/hierarchical/send_streams.cuh"

namespace jax_ep {

// `Finder` finds a token's rows: Rows(source, token), called by one warp once for every token of
// each rank.
template <typename Finder>
class ReceiveStreams {
 public:
  __device__ ReceiveStreams(const TokenParams& params, const HierarchicalLayout& layout,
                            const Finder& finder, const RoleContext& role, uint64_t sequence)
      : params_(params),
        layout_(layout),
        finder_(finder),
        role_(role),
        sequence_(sequence),
        rank_(params.call.control->rank),
        copies_(params.expand_pipeline, role, params.call, params.row_scales) {}

  __device__ int count() const { return params_.call.num_ranks; }
  __device__ int First(int block) const { return block % count(); }
  __device__ int NumItems(int /*stream*/) const { return layout_.num_chunks; }

  __device__ bool IsReady(int stream, int chunk) const {
    const int source = Source(stream);
    if (source == rank_) return true;
    if (IsPartner(source)) {
      const int rail = RailIndex(source);
      return HasMetadata(params_.call, layout_, rail) &&
             Rail(params_.call, layout_, rail).HasArrived(layout_.num_metadata + chunk);
    }
    return HasChunk(params_.call, source, DomainSlot(layout_, sequence_, chunk));
  }
  __device__ int Peer(int stream, int /*chunk*/) const {
    const int source = Source(stream);
    return IsPartner(source) ? source : Sender(source);
  }
  __device__ bool HasEntered() const { return HasAllMetadata(params_.call, layout_); }

  __device__ void Run(int stream, int chunk) {
    const CallParams& call = params_.call;
    const int source = Source(stream);
    const bool is_partner = IsPartner(source);
    uint64_t tokens = ~uint64_t{0};  // those with a row at `rows`
    const uint4* rows = nullptr;
    if (is_partner) {
      const Rail rail(call, layout_, RailIndex(source));
      const int message = layout_.num_metadata + chunk;
      tokens = LoadRelaxedSystem(&rail.Header(message).tokens);
      rows = reinterpret_cast<const uint4*>(rail.Received(message) + kHeaderBytes);
    } else if (source != rank_) {
      const DomainSlot slot(layout_, sequence_, chunk);
      rows = call.LocalBuffer<const uint4>(kReceivedRows) +
             RingOffset(call, layout_, rank_, source, slot.slot);
    }
    if (!HasPipeline()) return;
    copies_.Begin();
    const int num_warps = params_.expand_pipeline.num_warps;
    ForEachToken(call, layout_, chunk, role_.Warp(), num_warps, [&](int index, int token) {
      const TokenRows found = finder_.Rows(source, token);
      if (found.assignments == 0 || !IsIn(tokens, index)) return;
      RowSource from = OperandRow(params_, token);
      if (source != rank_) {
        const int row = is_partner ? RowIn(tokens, index) : index;
        from = {rows + int64_t{row} * call.wire_vectors};
      }
      Expand(source, token, from, found);
    });
    copies_.StoreAll();
  }

  __device__ SpanKind SpanOf(int /*stream*/) const { return SpanKind::kExpand; }

  // Returns the credit of the item's slot, which has been read.
  __device__ void Complete(int stream, int chunk) {
    const int source = Source(stream);
    if (source == rank_) return;
    role_.Sync();
    if (role_.Warp() == 0) InjectDelayOfItem(params_.call, sequence_, 6, chunk);
    if (role_.Thread() != 0) return;
    if (IsPartner(source)) {
      const Rail rail(params_.call, layout_, RailIndex(source));
      FinishRead(params_.call, layout_, rail, layout_.num_metadata + chunk);
    } else {
      // SIGNAL_CREDIT
      const DomainSlot slot(layout_, sequence_, chunk);
      StoreDomainFlag(params_.call.control, Sender(source), DomainFlag::kCredit,
                      layout_.domains.Partner(rank_, source), slot.slot, slot.number);
    }
  }

  // Waits until all rows are stored.
  __device__ void Finish() {
    if (HasPipeline()) copies_.Finish();
  }

 private:
  // Each rank begins with itself.
  __device__ int Source(int stream) const { return params_.call.RankAfter(rank_, stream); }
  __device__ bool IsPartner(int source) const { return layout_.domains.ArePartners(rank_, source); }
  __device__ int RailIndex(int source) const {
    return layout_.domains.Rail(layout_.domains.Domain(rank_), layout_.domains.Domain(source));
  }
  // Returns the rank of this domain that sends a source's tokens.
  __device__ int Sender(int source) const { return layout_.domains.Partner(source, rank_); }
  __device__ bool HasPipeline() const { return role_.Warp() < params_.expand_pipeline.num_warps; }

  __device__ void Expand(int source, int token, const RowSource& from, const TokenRows& found) {
    const CallParams& call = params_.call;
    const float* weights = params_.topk_weights;
    if (source != rank_) {
      weights = call.LocalBuffer<const float>(kReceivedWeights) +
                int64_t{source} * call.num_assignments();
    }
    PeerPointer<uint4> to[2] = {PeerPointer<uint4>(nullptr), PeerPointer<uint4>(nullptr)};
    for (int i = 0; i < 2; ++i) {
      const int32_t row = found.rows[i];
      if (row < 0) continue;
      const int k = LaneIndex() + 32 * i;
      if (params_.has_weights) {
        params_.row_weights[row] = LoadGlobalNoAllocate(&weights[token * call.top_k + k]);
      }
      to[i] = RowAddress(params_, row);
    }
    copies_.Add(from, found.assignments, to, found.rows);
  }

  const TokenParams& params_;
  const HierarchicalLayout& layout_;
  const Finder& finder_;
  const RoleContext& role_;
  const uint64_t sequence_;
  const int rank_;
  RowCopies copies_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_RECEIVE_STREAMS_CUH_
