// Which rows the choices of a token have here, and what the plan says of them.
#ifndef JAX_EP_DEVICE_TRANSFER_ROW_PLACEMENT_CUH_
#define JAX_EP_DEVICE_TRANSFER_ROW_PLACEMENT_CUH_

#include "ffi/device/transfer/dispatch_results.cuh"
#include "ffi/device/transfer/quotas.cuh"

namespace jax_ep {

// Gives every kept choice of a token its row, by its routes and by the quotas and first rows of
// the destinations. By single warps, each lane with its choices (AssignmentValue).
class RowPlacement {
 public:
  template <int kHalves>
  struct Token {
    TokenRowsPerLane<kHalves> found;
    int32_t destinations[kHalves];  // the ranks that the choices go to; -1 if unrouted or dropped
    int32_t slot;                   // of this rank, among those that the token visits
  };

  __device__ RowPlacement(const Call& call, const PlanResults& plan, const Quotas& quotas, int rank)
      : call_(call), plan_(plan), quotas_(quotas), rank_(rank) {}

  template <int kHalves>
  __device__ Token<kHalves> Place(int source, const Route (&routes)[kHalves]) const {
    Token<kHalves> token;
    for (int half = 0; half < kHalves; ++half) {
      token.destinations[half] = DestinationOf(routes[half]);
    }
    const uint64_t visited = VisitedRanks(token.destinations);
    token.slot = __popcll(visited & ((uint64_t{1} << rank_) - 1));
    token.found.choices = 0;
    for (int half = 0; half < kHalves; ++half) {
      int32_t row = -1;
      if (token.destinations[half] == rank_) {
        const int local = routes[half].expert - rank_ * call_.num_local;
        row = quotas_.FirstRow(source, local) + routes[half].position;
        if (row < 0 || row >= call_.num_rows) row = -1;
      }
      token.found.rows[half] = row;
      token.found.choices |= uint64_t{__ballot_sync(kFullWarp, row >= 0)} << (32 * half);
    }
    return token;
  }

  // Once for each token of each rank.
  template <int kHalves>
  __device__ void Write(int source, int token, const Token<kHalves>& placed) const {
    for (int half = 0; half < kHalves; ++half) {
      const int k = threadIdx.x % 32 + 32 * half;
      const int32_t row = placed.found.rows[half];
      if (row >= 0) SetRow(plan_, row, source, token, k, placed.slot);
      if (source != rank_ || k >= call_.top_k) continue;
      const int64_t choice = int64_t{token} * call_.top_k + k;
      plan_.kept[choice] = placed.destinations[half] >= 0;
      plan_.destination[choice] = placed.destinations[half];
    }
  }

 private:
  // Routes are a peer's data.
  __device__ int DestinationOf(const Route& route) const {
    const bool is_routed =
        0 <= route.expert && route.expert < call_.num_experts && route.position >= 0;
    return is_routed && route.position < quotas_.QuotaOf(route.expert)
               ? call_.by_num_local.Quotient(route.expert)
               : -1;
  }

  const Call& call_;
  const PlanResults& plan_;
  const Quotas& quotas_;
  const int rank_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_ROW_PLACEMENT_CUH_
