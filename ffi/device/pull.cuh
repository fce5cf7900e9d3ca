// What both dispatches end with: each token that has rows here is brought over NVLink once and
// stored to all of them; rows that come from no token are filled.
#ifndef JAX_EP_DEVICE_PULL_CUH_
#define JAX_EP_DEVICE_PULL_CUH_

#include "ffi/device/dispatch_results.cuh"
#include "ffi/device/pull_stage.h"
#include "ffi/device/row_copies.cuh"
#include "ffi/device/signal.cuh"
#include "ffi/device/tickets.cuh"

namespace jax_ep {

// Where each rank's tokens and weights are to be read. In shared memory.
struct Sources {
  const uint4* rows[kMaxPeers];
  const float* weights[kMaxPeers];

  // My own, by one thread.
  __device__ void SetMine(const PullStage& stage) {
    rows[stage.call.control->rank] = static_cast<const uint4*>(stage.x);
    weights[stage.call.control->rank] = stage.topk_weights;
  }

  // A peer's, at the gate.
  __device__ void Set(int peer, const FlagLine& line) {
    rows[peer] = static_cast<const uint4*>(Load(&line.rows));
    weights[peer] = static_cast<const float*>(Load(&line.weights));
  }

 private:
  template <typename T>
  __device__ static const void* Load(T* const* address) {
    return reinterpret_cast<const void*>(
        LoadRelaxedSystem(reinterpret_cast<const uint64_t*>(address)));
  }
};

// Parts of what is filled, up to `most` for this warp.
struct FillTickets {
  uint32_t* tickets;
  int most;

  __device__ int operator()() { return most-- > 0 ? NextTicketOfWarp(tickets) : kMaxItems; }
};

// All tokens, handed out to the warps that have a ring.
class TokenPull {
 public:
  // What needs no peer. By all threads, when nothing else is in the ring's memory.
  __device__ explicit TokenPull(const PullStage& stage)
      : stage_(stage),
        copies_(stage.ring, stage.call.row_chunks),
        tickets_(&stage.call.control->progress.warp_tickets[0],
                 threadIdx.x / 32 * gridDim.x + blockIdx.x, gridDim.x * stage.ring.num_warps) {}

  // After the gate and a barrier. `finder` finds a token's rows in two steps, because what it reads
  // may be far: Load(source, token) and, one token later, Rows(source, token, loaded).
  // fill(most) is other work, in parts: one when this warp's first row is on its way, and what is
  // left when all are.
  template <typename Finder, typename Fill>
  __device__ void Run(const Sources& sources, const Finder& finder, Fill fill) {
    const Call& call = stage_.call;
    const bool has_ring = threadIdx.x / 32 < stage_.ring.num_warps;
    const int lane = threadIdx.x % 32;
    const int rank = call.control->rank;
    const int num_items = call.num_all_tokens();
    // Each rank begins at its own right neighbour, so that all links carry data at once.
    const auto source_of = [&](int item) {
      return call.RankAfter(item % call.num_ranks, rank + 1);
    };
    float weights[2] = {};
    typename Finder::Loaded next = {};
    float next_weights[2] = {};
    const auto load = [&](int item) {
      if (item >= num_items) return;
      const int source = source_of(item);
      const int token = item / call.num_ranks;
      next = finder.Load(source, token);
      for (int half = 0; stage_.has_weights && half < 2; ++half) {
        const int k = lane + 32 * half;
        if (k >= call.top_k) continue;
        next_weights[half] = LoadShared4(&sources.weights[source][int64_t{token} * call.top_k + k]);
      }
    };
    // By this warp, if it has rows here.
    const auto bring = [&](int item, const typename Finder::Loaded& loaded) {
      const int source = source_of(item);
      const int token = item / call.num_ranks;
      const TokenRows found = finder.Rows(source, token, loaded);
      if (found.choices == 0) return;
      uint4* places[2] = {};
      for (int half = 0; half < 2; ++half) {
        const int32_t row = found.rows[half];
        if (row < 0) continue;
        if (stage_.has_weights) stage_.row_weights[row] = weights[half];
        places[half] = static_cast<uint4*>(stage_.rows) + int64_t{row} * call.row_chunks;
      }
      copies_.Add(sources.rows[source] + int64_t{token} * call.row_chunks, found.choices, places);
    };
    if (has_ring) copies_.Begin();
    int following = has_ring ? tickets_.Next() : num_items;
    load(following);
    for (bool is_first = true;; is_first = false) {
      const int item = following;
      if (item < num_items) {
        const typename Finder::Loaded loaded = next;
        weights[0] = next_weights[0];
        weights[1] = next_weights[1];
        following = tickets_.Next();
        load(following);
        bring(item, loaded);
      }
      const bool is_done = item >= num_items;
      if (is_first || is_done) fill(is_done ? kMaxItems : 1);
      if (is_done) break;
    }
    if (has_ring) copies_.Finish();
  }

 private:
  const PullStage& stage_;
  RowCopies copies_;
  WarpTickets tickets_;
};

// to[i] = from[i] for i in [first, end). By all threads of a block.
template <typename T>
__device__ inline void CopyByBlock(T* to, const T* from, int64_t first, int64_t end) {
  constexpr int kCopies = 4;  // loads in flight of a thread
  const int stride = blockDim.x;
  for (int64_t i = first + threadIdx.x; i < end; i += kCopies * stride) {
    T values[kCopies];
#pragma unroll
    for (int j = 0; j < kCopies; ++j) {
      if (i + j * stride < end) values[j] = from[i + j * stride];
    }
#pragma unroll
    for (int j = 0; j < kCopies; ++j) {
      if (i + j * stride < end) to[i + j * stride] = values[j];
    }
  }
}

// The `part`th of `num_parts` of this rank's tokens and weights to where peers read them, if that
// is not where they are. By all threads of a block.
__device__ inline void CopyForPeers(const PullStage& stage, int64_t part, int64_t num_parts) {
  const Call& call = stage.call;
  if (stage.is_in_place || call.num_ranks == 1) return;
  const int rank = call.control->rank;
  const int64_t chunks = int64_t{call.num_tokens} * call.row_chunks;
  CopyByBlock(call.Of<uint4>(rank, kPublishedRows), static_cast<const uint4*>(stage.x),
              chunks * part / num_parts, chunks * (part + 1) / num_parts);
  if (!stage.has_weights) return;
  const int64_t choices = call.num_choices();
  CopyByBlock(call.Of<float>(rank, kPublishedWeights), stage.topk_weights,
              choices * part / num_parts, choices * (part + 1) / num_parts);
}

// Where peers find this rank's tokens; nothing after an abort. By all threads of one block.
__device__ inline void StoreLinesOfTokens(const PullStage& stage, uint64_t epoch) {
  const Call& call = stage.call;
  if (threadIdx.x >= 32 || !MayPush(call)) return;
  const int rank = call.control->rank;
  const bool is_copied = !stage.is_in_place;
  StoreLines(call, epoch, false, is_copied ? call.Of<uint4>(rank, kPublishedRows) : stage.x,
             is_copied ? call.Of<float>(rank, kPublishedWeights) : stage.topk_weights);
}

// And that they may. By all threads of the block that finished the last part of what they read: it
// sees the abort, if any other has.
__device__ inline void SignalTokens(const Call& call, const PeerControls& peers, uint64_t epoch) {
  if (threadIdx.x >= 32 || !MayPush(call)) return;
  SignalReady(call, epoch, [&](int peer) { return peers.of[peer]; });
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PULL_CUH_
