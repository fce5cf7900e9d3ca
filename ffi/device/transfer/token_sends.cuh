// The sending half of both dispatches: each token of this rank goes once to every peer that it
// visits, into that one's memory, chunk by chunk.
#ifndef JAX_EP_DEVICE_TRANSFER_TOKEN_SENDS_CUH_
#define JAX_EP_DEVICE_TRANSFER_TOKEN_SENDS_CUH_

#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/protocol/work_items.cuh"
#include "ffi/device/transfer/row_copies.cuh"
#include "ffi/device/transfer/token_params.h"

namespace jax_ep {

// By all threads of a block, each once, on whichever way: those that send wait here for the others,
// who have parts whose fence would wait for all that is on its way from this multiprocessor.
__device__ inline void ReleaseSenders() { __syncthreads(); }

// Where the tokens of the rank that is `distance` further on than `rank` arrive there.
__device__ inline uint4* ReceivedRows(const TokenParams& stage, int rank, int distance) {
  const Call& call = stage.call;
  return call.Of<uint4>(rank, kReceivedRows) +
         int64_t{distance - 1} * stage.chunks.window * call.row_vectors;
}

// And a token among them.
__device__ inline int64_t PlaceOf(const TokenParams& stage, int token) {
  return int64_t{token % stage.chunks.window} * stage.call.row_vectors;
}

// How many tokens a chunk has.
__device__ inline int TokensOf(const TokenParams& stage, int chunk) {
  return min(stage.chunks.tokens, stage.call.num_tokens - chunk * stage.chunks.tokens);
}

// A part of this rank's weights, to the other ranks. By threads of a block, after the gate.
__device__ inline void SendWeights(const TokenParams& stage, int64_t part, int64_t num_parts,
                                   const ThreadGroup& threads) {
  const Call& call = stage.call;
  if (!stage.has_weights) return;
  const int rank = call.control->rank;
  const int64_t choices = call.num_assignments();
  const int64_t end = choices * (part + 1) / num_parts;
#pragma unroll 1
  for (int64_t i = choices * part / num_parts + threads.number; i < end; i += threads.count) {
    const float weight = stage.topk_weights[i];
#pragma unroll 1
    for (int distance = 1; distance < call.num_ranks; ++distance) {
      call.Of<float>(call.RankAfter(rank, distance), kReceivedWeights)[rank * choices + i] = weight;
    }
  }
}

// By the last warps of a block, each one token at a time. destination_of(choice) is the rank that a
// choice of this rank goes to, or -1; `to_all`: it does not matter, all tokens go to all ranks.
class TokenSender {
 public:
  // `warp`: its number among those that send.
  __device__ TokenSender(const TokenParams& stage, int warp, uint64_t sequence)
      : stage_(stage),
        x_(static_cast<const uint4*>(stage.x)),
        sequence_(sequence),
        copies_(stage.sends, warp, stage.call.row_vectors) {}

  // After the gate.
  template <typename DestinationOf>
  __device__ Outcome Run(bool to_all, DestinationOf destination_of) {
    const Call& call = stage_.call;
    const int rank = call.control->rank;
    const int num_peers = call.num_ranks - 1;
    const int lane = threadIdx.x % 32;
    if (num_peers == 0) return Outcome::kArrived;
    // Peer i is the rank i + 1 further on: each rank begins with its own right neighbour, so that
    // all links carry data at once. Lane l has what is of l and l + 32.
    uint4* received_rows[2] = {};
    for (int half = 0; half < 2; ++half) {
      const int peer = lane + 32 * half;
      if (peer >= num_peers) continue;
      received_rows[half] =
          ReceivedRows(stage_, call.RankAfter(rank, peer + 1), call.num_ranks - 1 - peer);
    }
    WarpTicketPrefetch tickets(&call.control->progress.send_tickets);
    int32_t next[2] = {-1, -1};
    const auto load = [&](int token) {
      for (int half = 0; half < 2; ++half) {
        const int k = lane + 32 * half;
        next[half] =
            token < call.num_tokens && k < call.top_k ? destination_of(token * call.top_k + k) : -1;
      }
    };
    const int ring_chunks = stage_.chunks.ring_chunks;
    int num_chunks = ring_chunks;  // that there are places for
    copies_.Begin();
    int following = tickets.Next();
    load(following);
#pragma unroll 1
    while (following < call.num_tokens) {
      const int token = following;
      const uint64_t ranks = to_all ? ~uint64_t{0} : VisitedRanks(next);
      // As peers: bit `rank` would be the last.
      const uint64_t peers =
          (ranks >> 1 >> rank | ranks << (num_peers - rank)) & ((uint64_t{1} << num_peers) - 1);
      const int chunk = token / stage_.chunks.tokens;
      if (chunk >= num_chunks) {
        // WAIT_CREDIT
        const Outcome outcome =
            WaitForChunk(call, WaitPoint::kCredit, chunk - ring_chunks, sequence_);
        if (outcome != Outcome::kArrived) return outcome;
        num_chunks = chunk + 1;
        copies_.Begin();
      }
      uint4* places[2] = {};
      for (int half = 0; half < 2; ++half) {
        if (!(peers >> (lane + 32 * half) & 1)) continue;
        places[half] = received_rows[half] + PlaceOf(stage_, token);
      }
      if (peers != 0) copies_.Add(x_ + int64_t{token} * call.row_vectors, peers, places);
      following = tickets.Next();
      load(following);
      if (peers != 0) copies_.Finish();
      FinishToken(chunk);
    }
    return Outcome::kArrived;
  }

 private:
  // It has arrived wherever it goes. The last one of a chunk says so to all peers.
  __device__ void FinishToken(int chunk) {
    const Call& call = stage_.call;
    Progress& progress = call.control->progress;
    bool is_last = false;
    if (threadIdx.x % 32 == 0) {
      const uint32_t before = AddAcquireReleaseDevice(&progress.chunks_finished[0][chunk], 1);
      is_last = before + 1 == static_cast<uint32_t>(TokensOf(stage_, chunk));
      // With the chunk the peers have this rank's counts, routes and weights.
      if (is_last) WaitForItems(&progress.finished, call.num_parts);
    }
    SignalIfLast(call, is_last, WaitPoint::kChunk, chunk, sequence_, 4);  // SIGNAL_CHUNK
  }

  const TokenParams& stage_;
  const uint4* const x_;
  const uint64_t sequence_;
  RowCopies copies_;
};

// By the last warps of a block.
template <typename DestinationOf>
__device__ inline Outcome SendTokens(const TokenParams& stage, uint64_t sequence, bool to_all,
                                     DestinationOf destination_of) {
  const int first = static_cast<int>(blockDim.x) / 32 - stage.sends.num_warps;
  // The first to come, which are surely running.
  const int sender = NextWarpTicket(&stage.call.control->progress.senders);
  TokenSender sends(stage, static_cast<int>(threadIdx.x) / 32 - first, sequence);
  InjectDelay(stage.call, sequence, 5);
  const Outcome outcome = WaitForEntry(stage.call, sequence);
  ReleaseSenders();
  if (outcome != Outcome::kArrived || sender >= stage.num_senders) return outcome;
  return sends.Run(to_all, destination_of);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_TOKEN_SENDS_CUH_
