// The expand warps of dispatch and redispatch. They store each token that has arrived on this rank
// to all of its rows, and fill the rows that come from no token.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_TOKEN_EXPANSION_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_TOKEN_EXPANSION_CUH_

#include "ffi/device/transfer/dispatch/results.cuh"
#include "ffi/device/transfer/dispatch/token_sender.cuh"

namespace jax_ep {

// The items of FillEmptyRows, up to max_items for this warp.
struct FillItems {
  uint32_t* tickets;
  int max_items;

  __device__ int operator()() { return max_items-- > 0 ? NextWarpTicket(tickets) : kMaxItems; }
};

// Called by the expand warps; those of one block return the same. Waits for entry, for this rank's
// prologue items, and for the first chunk of each peer, which covers the peer's counts, routes and
// weights.
__device__ inline Outcome WaitForFirstChunks(const TokenParams& params, const RoleContext& role,
                                             uint64_t sequence) {
  const CallParams& call = params.call;
  return WaitByFirstWarp(call, sequence, role, [&] {
    const Outcome outcome = WaitForEntry(call, sequence);
    if (outcome != Outcome::kArrived) return outcome;
    if (role.Thread() == 0)
      WaitForItems(&call.control->progress.items_finished, call.num_prologue_items);
    __syncwarp();
    if (call.num_tokens == 0) return outcome;
    return WaitForChunk(call, WaitPoint::kChunk, 0, sequence);  // WAIT_CHUNK
  });
}

// Used by an expand warp. The tokens of all ranks are handed out chunk by chunk, in the order in
// which they are sent (send_order.cuh). This rank's own tokens need no wait, and are some chunks
// ahead.
template <typename Order>
class TokenExpansion {
 public:
  // Needs no peer. Called by the expand warps, when the pipelines' shared memory is free.
  __device__ TokenExpansion(const TokenParams& params, const Order& order, const RoleContext& role)
      : params_(params),
        order_(order),
        num_reused_(params.chunks.num_chunks - params.chunks.ring_chunks),
        copies_(params.expand_pipeline, role, params.call, params.row_scales),
        has_pipeline_(role.Warp() < params.expand_pipeline.num_warps),
        tickets_(&params.call.control->progress.warp_tickets, has_pipeline_) {}

  // Called after WaitForFirstChunks. Each warp returns its own outcome. `finder` finds a token's
  // rows in two steps, to hide the latency of its loads: Load(source, token) and, one token later,
  // Rows(source, token, loaded). fill(max_items) does other work: one item when the warp's first
  // row is in flight, and the rest when all rows are.
  template <typename Finder, typename Fill>
  __device__ Outcome Run(uint64_t sequence, const Finder& finder, Fill fill) {
    const ProfileSpan span(SpanKind::kExpand);
    const CallParams& call = params_.call;
    const int lane = LaneIndex();
    const int rank = call.control->rank;
    const float* const received_weights = call.LocalBuffer<float>(kReceivedWeights);
    const uint4* const received_rows = call.LocalBuffer<uint4>(kReceivedRows);
    float next_weights[2] = {};
    typename Finder::Loaded next_loaded = {};
    const auto load = [&](const Item& item) {
      if (item.position < 0) return;
      const int source = call.RankAfter(rank, item.distance);
      const int token = order_.Token(source, item.position);
      next_loaded = finder.Load(source, token);
      const float* const weights = item.distance == 0
                                       ? params_.topk_weights
                                       : received_weights + source * call.num_assignments();
      for (int i = 0; params_.has_weights && i < 2; ++i) {
        const int k = lane + 32 * i;
        if (k < call.top_k)
          next_weights[i] = LoadGlobalNoAllocate(&weights[token * call.top_k + k]);
      }
    };
    if (has_pipeline_) copies_.Begin();
    const int num_items = NumItems();
    int next_ticket = has_pipeline_ ? tickets_.Next() : num_items;
    Item next_item = ItemOf(next_ticket);
    load(next_item);
    int num_chunks = 0;  // arrived chunks
    auto outcome = Outcome::kArrived;
    bool is_first = true;
#pragma unroll 1
    while (next_ticket < num_items) {
      const Item item = next_item;
      const typename Finder::Loaded loaded = next_loaded;
      const float weights[2] = {next_weights[0], next_weights[1]};
      next_ticket = tickets_.Next();
      // Measured: with long rows, waiting for it now is 1 % faster than in the next round.
      tickets_.Wait();
      next_item = ItemOf(next_ticket);
      load(next_item);
      if (item.position < 0) continue;
      const int source = call.RankAfter(rank, item.distance);
      const int token = order_.Token(source, item.position);
      const TokenRows found = finder.Rows(source, token, loaded);
      const int chunk = params_.chunk_tokens_divmod.Quotient(item.position);
      if (item.distance > 0 && chunk >= num_chunks) {
        num_chunks = CountArrivedChunks(call, sequence);
        if (chunk >= num_chunks) {
          copies_.StoreAll();  // the wait may be long
          ReturnCredit(sequence);
          outcome = WaitForChunk(call, WaitPoint::kChunk, chunk, sequence);  // WAIT_CHUNK
          if (outcome != Outcome::kArrived) break;
          num_chunks = chunk + 1;
        }
        copies_.Begin();
      }
      if (found.assignments != 0) {
        PeerPointer<uint4> rows[2] = {};
        for (int i = 0; i < 2; ++i) {
          const int32_t row = found.rows[i];
          if (row < 0) continue;
          if (params_.has_weights) params_.row_weights[row] = weights[i];
          rows[i] = RowAddress(params_, row);
        }
        const RowSource from =
            item.distance == 0
                ? OperandRow(params_, token)
                : RowSource{received_rows + SlotOffset(params_, item.distance, item.position)};
        copies_.Add(from, found.assignments, rows, found.rows);
        if (params_.arrivals != nullptr) {
          copies_.Finish();
          for (const int32_t row : found.rows) {
            if (row >= 0) CountArrival(params_, sequence, row);
          }
        }
      }
      if (item.distance > 0 && chunk < num_reused_) {
        if (chunk != expanded_.chunk) ReturnCredit(sequence);
        expanded_ = {chunk, expanded_.tokens + 1, copies_.num_added()};
      }
      if (is_first) fill(1);
      is_first = false;
    }
    if (outcome == Outcome::kArrived) {
      ReturnCredit(sequence);
      fill(kMaxItems);
    }
    if (has_pipeline_) copies_.Finish();
    return outcome;
  }

 private:
  // A send position of the rank `distance` after this one; -1 if there is none.
  struct Item {
    int distance;
    int position;
  };
  static constexpr int kChunksAhead = 4;

  // This warp's tokens of peers in the current chunk.
  struct ExpandedTokens {
    int chunk;
    int tokens;
    int num_added;  // segments added to copies_, up to the last of these tokens
  };

  // Releases the ring slots of the expanded tokens. The last warp of a chunk returns the credit:
  // peers may then overwrite the slots.
  __device__ void ReturnCredit(uint64_t sequence) {
    const CallParams& call = params_.call;
    const ExpandedTokens expanded = expanded_;
    expanded_.tokens = 0;
    if (expanded.tokens == 0) return;
    copies_.Store(expanded.num_added);
    bool is_last = false;
    if (LaneIndex() == 0) {
      // Relaxed: only loads precede the count, and their values have arrived, so no later store can
      // change them. A release would wait for all stores in flight from this SM's send warps.
      const auto tokens = static_cast<uint32_t>(expanded.tokens);
      const uint32_t before =
          atomicAdd(&call.control->progress.chunk_tokens_expanded[expanded.chunk], tokens);
      const int all = (call.num_ranks - 1) * ChunkTokens(params_, expanded.chunk);
      is_last = before + tokens == static_cast<uint32_t>(all);
    }
    // SIGNAL_CREDIT
    SignalChunkIfLast(call, is_last, WaitPoint::kCredit, expanded.chunk, sequence, 6);
  }

  __device__ int NumAhead() const { return kChunksAhead * params_.chunks.tokens; }
  // Every token of a peer has a token of this rank, some chunks ahead, beside it.
  __device__ int NumItems() const {
    return NumAhead() + params_.call.num_tokens * params_.call.num_ranks;
  }
  __device__ Item ItemOf(int ticket) const {
    const CallParams& call = params_.call;
    const int num_ahead = NumAhead();
    Item item = {0, ticket};
    if (ticket >= num_ahead) {
      const int later = ticket - num_ahead;
      item.position = params_.num_ranks_divmod.Quotient(later);
      item.distance = call.num_ranks - 1 - params_.num_ranks_divmod.Remainder(later);
      if (item.distance == 0) item.position += num_ahead;
    }
    if (item.position >= call.num_tokens) item.position = -1;
    return item;
  }

  const TokenParams& params_;
  const Order order_;
  const int num_reused_;  // the first chunks, whose slots are used again
  RowCopies copies_;
  const bool has_pipeline_;
  ExpandedTokens expanded_ = {};
  WarpTicketPrefetch tickets_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_TOKEN_EXPANSION_CUH_
