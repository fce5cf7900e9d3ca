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
    const int count = layout_.ChunkTokens(chunk, call.num_tokens);
    const int first = chunk * layout_.chunk_tokens;
    const bool is_own = source == rank_;
    const bool is_partner = !is_own && IsPartner(source);
    const Rail rail(call, layout_, is_partner ? RailIndex(source) : 0);
    const int message = layout_.num_metadata + chunk;
    const DomainSlot slot(layout_, sequence_, chunk);
    uint64_t tokens = ~uint64_t{0};  // those with a row at `rows`
    const uint4* rows = nullptr;
    if (is_partner) {
      tokens = LoadRelaxedSystem(&rail.Header(message).tokens);
      rows = reinterpret_cast<const uint4*>(rail.Received(message) + kHeaderBytes);
    } else if (!is_own) {
      rows = call.LocalBuffer<const uint4>(kReceivedRows) +
             RingOffset(call, layout_, rank_, source, slot.slot);
    }
    if (HasPipeline()) {
      copies_.Begin();
#pragma unroll 1
      for (int index = role_.Warp(); index < count; index += params_.expand_pipeline.num_warps) {
        const TokenRows found = finder_.Rows(source, first + index);
        if (found.assignments == 0 || !(tokens >> index & 1)) continue;
        RowSource from = OperandRow(params_, first + index);
        if (!is_own) {
          const int row = is_partner ? __popcll(tokens & ((uint64_t{1} << index) - 1)) : index;
          from = {rows + int64_t{row} * call.wire_vectors};
        }
        Expand(source, first + index, from, found);
      }
      copies_.StoreAll();
    }
    last_stream_ = stream;
    last_chunk_ = chunk;
  }

  // Ends the last item: returns the credit of its slot, which has been read.
  __device__ void Complete() {
    if (last_stream_ < 0) return;
    const int source = Source(last_stream_);
    const int chunk = last_chunk_;
    last_stream_ = -1;
    if (source == rank_) return;
    role_.Sync();
    if (role_.Warp() == 0) InjectDelayOfItem(params_.call, sequence_, 6, chunk);
    if (role_.Thread() != 0) return;
    if (IsPartner(source)) {
      const Rail rail(params_.call, layout_, RailIndex(source));
      FinishRead(params_.call, layout_, rail, layout_.num_metadata + chunk);
    } else {
      // SIGNAL_CREDIT
      const Domains& domains = layout_.domains;
      const DomainSlot slot(layout_, sequence_, chunk);
      const int ring = domains.Rank(domains.Domain(source), domains.Index(rank_));
      StoreDomainFlag(params_.call.control, Sender(source), DomainFlag::kCredit, ring, slot.slot,
                      slot.number);
    }
  }

  // Waits until all rows are stored.
  __device__ void Finish() {
    if (HasPipeline()) copies_.Finish();
  }

 private:
  // Each rank begins with itself.
  __device__ int Source(int stream) const { return params_.call.RankAfter(rank_, stream); }
  __device__ bool IsPartner(int source) const {
    return source != rank_ && layout_.domains.Index(source) == layout_.domains.Index(rank_);
  }
  __device__ int RailIndex(int source) const {
    return layout_.domains.Rail(layout_.domains.Domain(rank_), layout_.domains.Domain(source));
  }
  // Returns the rank of this domain that sends a source's tokens.
  __device__ int Sender(int source) const {
    return layout_.domains.Rank(layout_.domains.Domain(rank_), layout_.domains.Index(source));
  }
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
  int last_stream_ = -1;  // the item that is not complete yet
  int last_chunk_ = 0;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_RECEIVE_STREAMS_CUH_
