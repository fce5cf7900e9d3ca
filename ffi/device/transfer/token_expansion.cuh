// The receiving half of both dispatches: each token that visits this rank is stored to all of its
// rows, when it has come; rows that come from no token are filled.
#ifndef JAX_EP_DEVICE_TRANSFER_TOKEN_EXPANSION_CUH_
#define JAX_EP_DEVICE_TRANSFER_TOKEN_EXPANSION_CUH_

#include "ffi/device/transfer/dispatch_results.cuh"
#include "ffi/device/transfer/token_sends.cuh"

namespace jax_ep {

// Parts of what is filled, up to `most` for this warp.
struct FillTickets {
  uint32_t* tickets;
  int most;

  __device__ int operator()() { return most-- > 0 ? NextWarpTicket(tickets) : kMaxItems; }
};

// Passes the gate, and waits until this rank's parts are finished and the first chunk of each peer
// has come: with it all of that one's counts, routes and weights. By threads of a block, that
// return the same.
__device__ inline Outcome WaitForFirstChunks(const TokenParams& stage, const ThreadGroup& threads,
                                             uint64_t sequence) {
  const Call& call = stage.call;
  return WaitForAll(call, sequence, threads, [&] {
    const Outcome outcome = WaitForEntry(call, sequence);
    if (outcome != Outcome::kArrived) return outcome;
    if (threads.number == 0) WaitForItems(&call.control->progress.finished, call.num_parts);
    __syncwarp();
    if (call.num_tokens == 0) return outcome;
    return WaitForChunk(call, WaitPoint::kChunk, 0, sequence);  // WAIT_CHUNK
  });
}

// All ranks' tokens, handed out to the warps that do not send, chunk by chunk. This rank's own,
// which nobody waits for, are some chunks ahead.
class TokenExpansion {
 public:
  // What needs no peer. By the first warps of a block, when nothing else is in the ring's memory.
  __device__ explicit TokenExpansion(const TokenParams& stage)
      : stage_(stage),
        warp_(static_cast<int>(threadIdx.x) / 32),
        num_reused_(stage.chunks.num_chunks - stage.chunks.ring_chunks),
        copies_(stage.expansions, warp_, stage.call.row_vectors),
        has_ring_(warp_ < stage.expansions.num_warps),
        tickets_(&stage.call.control->progress.warp_tickets, has_ring_) {}

  // By the warps that do not send, when routes and weights of all ranks are here. `finder` finds a
  // token's rows in two steps, because what it reads is far: Load(source, token) and, one token
  // later, Rows(source, token, loaded). fill(most) is other work, in parts: one when this warp's
  // first row is on its way, and what is left when all are. Each warp's outcome is its own.
  template <typename Finder, typename Fill>
  __device__ Outcome Run(uint64_t sequence, const Finder& finder, Fill fill) {
    const Call& call = stage_.call;
    const int lane = threadIdx.x % 32;
    const int rank = call.control->rank;
    const float* const received_weights = call.Of<float>(rank, kReceivedWeights);
    float next_weights[2] = {};
    typename Finder::Loaded next = {};
    const auto load = [&](const Item& item) {
      if (item.token < 0) return;
      const int source = call.RankAfter(rank, item.distance);
      next = finder.Load(source, item.token);
      const float* const weights = item.distance == 0
                                       ? stage_.topk_weights
                                       : received_weights + source * call.num_assignments();
      for (int half = 0; stage_.has_weights && half < 2; ++half) {
        const int k = lane + 32 * half;
        if (k < call.top_k)
          next_weights[half] = LoadGlobalNoAllocate(&weights[item.token * call.top_k + k]);
      }
    };
    if (has_ring_) copies_.Begin();
    const int num_items = NumItems();
    int following = has_ring_ ? tickets_.Next() : num_items;
    Item following_item = At(following);
    load(following_item);
    int num_chunks = 0;  // that have come
    auto outcome = Outcome::kArrived;
    bool is_first = true;
#pragma unroll 1
    while (following < num_items) {
      const Item item = following_item;
      const typename Finder::Loaded loaded = next;
      const float weights[2] = {next_weights[0], next_weights[1]};
      following = tickets_.Next();
      following_item = At(following);
      load(following_item);
      if (item.token < 0) continue;
      const TokenRows found = finder.Rows(call.RankAfter(rank, item.distance), item.token, loaded);
      const int chunk = item.token / stage_.chunks.tokens;
      if (item.distance > 0 && chunk >= num_chunks) {
        num_chunks = CountChunks(call, sequence);
        if (chunk >= num_chunks) {
          copies_.StoreAll();  // it may take a while
          ReturnCredit(sequence);
          outcome = WaitForChunk(call, WaitPoint::kChunk, chunk, sequence);  // WAIT_CHUNK
          if (outcome != Outcome::kArrived) break;
          num_chunks = chunk + 1;
        }
        copies_.Begin();
      }
      if (found.choices != 0) {
        uint4* places[2] = {};
        for (int half = 0; half < 2; ++half) {
          const int32_t row = found.rows[half];
          if (row < 0) continue;
          if (stage_.has_weights) stage_.row_weights[row] = weights[half];
          places[half] = static_cast<uint4*>(stage_.rows) + int64_t{row} * call.row_vectors;
        }
        const uint4* const from =
            item.distance == 0
                ? static_cast<const uint4*>(stage_.x) + int64_t{item.token} * call.row_vectors
                : ReceivedRows(stage_, rank, item.distance) + PlaceOf(stage_, item.token);
        copies_.Add(from, found.choices, places);
        if (stage_.arrivals != nullptr) {
          copies_.Finish();
          for (const int32_t row : found.rows) {
            if (row >= 0) CountArrival(stage_, row);
          }
        }
      }
      if (item.distance > 0 && chunk < num_reused_) {
        if (chunk != brought_.chunk) ReturnCredit(sequence);
        brought_ = {chunk, brought_.tokens + 1, copies_.num_added()};
      }
      if (is_first) fill(1);
      is_first = false;
    }
    if (outcome == Outcome::kArrived) {
      ReturnCredit(sequence);
      fill(kMaxItems);
    }
    if (has_ring_) copies_.Finish();
    return outcome;
  }

 private:
  // A token of the rank that is `distance` further on; -1 if there is none.
  struct Item {
    int distance;
    int token;
  };
  static constexpr int kChunksAhead = 4;

  // This warp's tokens of peers, of the chunk that it is at.
  struct ExpandedTokens {
    int chunk;
    int tokens;
    int num_added;  // parts of rows, with the last of them
  };

  // They have been read. The last warp of a chunk tells the peers: they may overwrite it.
  __device__ void ReturnCredit(uint64_t sequence) {
    const Call& call = stage_.call;
    const ExpandedTokens brought = brought_;
    brought_.tokens = 0;
    if (brought.tokens == 0) return;
    copies_.Store(brought.num_added);
    bool is_last = false;
    if (threadIdx.x % 32 == 0) {
      // Relaxed: what is counted are loads, whose values have come, so no later store changes them.
      // A release would wait for all that is on its way from this multiprocessor's senders.
      const auto tokens = static_cast<uint32_t>(brought.tokens);
      const uint32_t before =
          atomicAdd(&call.control->progress.chunks_expanded[brought.chunk], tokens);
      const int all = (call.num_ranks - 1) * TokensOf(stage_, brought.chunk);
      is_last = before + tokens == static_cast<uint32_t>(all);
    }
    // SIGNAL_CREDIT
    SignalIfLast(call, is_last, WaitPoint::kCredit, brought.chunk, sequence, 6);
  }

  __device__ int NumAhead() const { return kChunksAhead * stage_.chunks.tokens; }
  // Every token of a peer comes with one of this rank's, which is ahead.
  __device__ int NumItems() const {
    return NumAhead() + stage_.call.num_tokens * stage_.call.num_ranks;
  }
  __device__ Item At(int number) const {
    const Call& call = stage_.call;
    const int num_ahead = NumAhead();
    Item item = {0, number};
    if (number >= num_ahead) {
      const int later = number - num_ahead;
      item.token = later / call.num_ranks;
      item.distance = call.num_ranks - 1 - later % call.num_ranks;
      if (item.distance == 0) item.token += num_ahead;
    }
    if (item.token >= call.num_tokens) item.token = -1;
    return item;
  }

  const TokenParams& stage_;
  const int warp_;        // among those that do not send
  const int num_reused_;  // chunks, the first ones, whose places peers wait for
  RowCopies copies_;
  const bool has_ring_;
  ExpandedTokens brought_ = {};
  WarpTicketPrefetch tickets_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_TOKEN_EXPANSION_CUH_
