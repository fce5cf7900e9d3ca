// The part of a plan that only two levels have: which ranks of the domain got a
// rail's tokens, and the index of partial sums in the domain.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_FORWARDING_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_FORWARDING_CUH_

#include "ffi/device/transfer/dispatch/received_routes.cuh"
#include "ffi/device/transfer/hierarchical/domains.h"

namespace jax_ep {

// Words of token_ranks per token.
JAX_EP_HOST_DEVICE constexpr int TokenRankWords(const Domains& domains) {
  return CeilDivide(domains.size, 32);
}

// Returns the words of a token of the rail partner in a domain, or of this rank, in token_ranks.
template <typename Word>
__device__ inline Word* TokenRanks(const CallParams& call, const Domains& domains,
                                   Word* token_ranks, int domain, int token) {
  return token_ranks + (int64_t{domain} * call.num_tokens + token) * TokenRankWords(domains);
}

// Finds a token's rows in a dispatch, and writes its part of the plan.
class ForwardedRoutes {
 public:
  __device__ ForwardedRoutes(const CallParams& call, const Domains& domains,
                             const RowPlacement& placement, const ForwardingResults& forwarding)
      : call_(call),
        domains_(domains),
        placement_(placement),
        forwarding_(forwarding),
        routes_(call, placement) {}

  __device__ TokenRows Rows(int source, int token) const {
    const ReceivedRoutes::Loaded loaded = routes_.Load(source, token);
    const RowPlacement::PlacedToken<2> placed = placement_.Place(source, loaded.routes);
    Write(source, token, placed);
    return placed.found;
  }

  // Called by one warp, once per token of each rank. Writes its part of the plan.
  template <int kPerLane>
  __device__ void Write(int source, int token,
                        const RowPlacement::PlacedToken<kPerLane>& placed) const {
    const int rank = call_.control->rank;
    placement_.Write(source, token, placed);
    const int here = domains_.Domain(rank);
    // Ranks of lower domains come first among the token's.
    int num_before = 0;
    for (int i = 0; i < kPerLane; ++i) {
      const int to = placed.destinations[i];
      const bool is_before = to >= 0 && domains_.Domain(to) < here;
      const auto of_lanes = static_cast<uint32_t>(placed.firsts >> (32 * i));
      num_before += __popc(__ballot_sync(kFullWarp, is_before) & of_lanes);
    }
    for (const int32_t row : placed.found.rows) {
      if (row >= 0) forwarding_.partial_sum_index[row] = placed.partial_sum_index - num_before;
    }
    if (domains_.Index(source) == domains_.Index(rank)) WriteRanks(source, token, placed);
  }

 private:
  // Writes the ranks of this domain that got an assignment of a token.
  template <int kPerLane>
  __device__ void WriteRanks(int source, int token,
                             const RowPlacement::PlacedToken<kPerLane>& placed) const {
    uint32_t* const to =
        TokenRanks(call_, domains_, forwarding_.token_ranks, domains_.Domain(source), token);
    const int first = domains_.Domain(call_.control->rank) * domains_.size;
#pragma unroll 1
    for (int word = 0; word < TokenRankWords(domains_); ++word) {
      uint32_t bits = 0;
      for (const int32_t destination : placed.destinations) {
        const int index = destination - first - 32 * word;
        if (0 <= index && index < 32 && destination < first + domains_.size) bits |= 1u << index;
      }
      bits = __reduce_or_sync(kFullWarp, bits);
      if (LaneIndex() == 0) to[word] = bits;
    }
  }

  const CallParams& call_;
  const Domains& domains_;
  const RowPlacement& placement_;
  const ForwardingResults& forwarding_;
  const ReceivedRoutes routes_;
};

// Called after a failure.
__device__ __noinline__ inline void WriteSafeForwarding(const CallParams& call,
                                                        const Domains& domains,
                                                        const ForwardingResults& forwarding,
                                                        const ThreadGroup& threads) {
  const int64_t words = int64_t{domains.count} * call.num_tokens * TokenRankWords(domains);
  Fill(threads, forwarding.token_ranks, words, 0u);
  Fill(threads, forwarding.partial_sum_index, call.num_rows, -1);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_FORWARDING_CUH_
