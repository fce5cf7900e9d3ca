// The rows of a token's assignments on this rank, derived from routes and quotas, and their part of
// the plan.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_ROW_PLACEMENT_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_ROW_PLACEMENT_CUH_

#include "ffi/device/transfer/dispatch/quotas.cuh"
#include "ffi/device/transfer/dispatch/results.cuh"
#include "ffi/device/transfer/lane_assignments.cuh"

namespace jax_ep {

// Called by one warp per token, with its assignments spread over the lanes (lane_assignments.cuh).
class RowPlacement {
 public:
  template <int kPerLane>
  struct PlacedToken {
    TokenRowsPerLane<kPerLane> found;
    int32_t destinations[kPerLane];  // ranks; -1 if unrouted or dropped
    uint64_t firsts;                 // see FirstAssignments
    int32_t partial_sum_index;       // this rank's index among the token's ranks
  };

  __device__ RowPlacement(const CallParams& call, const PlanResults& plan, const Quotas& quotas,
                          int rank)
      : call_(call), plan_(plan), quotas_(quotas), rank_(rank) {}

  template <int kPerLane>
  __device__ PlacedToken<kPerLane> Place(int source, const Route (&routes)[kPerLane]) const {
    PlacedToken<kPerLane> token;
    for (int i = 0; i < kPerLane; ++i) token.destinations[i] = Destination(routes[i]);
    token.firsts = FirstAssignments(token.destinations);
    token.partial_sum_index = 0;
    token.found.assignments = 0;
    for (int i = 0; i < kPerLane; ++i) {
      // Lower ranks come first. The first assignments have one for each of them.
      const bool is_lower = token.destinations[i] < rank_;
      const auto of_lanes = static_cast<uint32_t>(token.firsts >> (32 * i));
      token.partial_sum_index += __popc(__ballot_sync(kFullWarp, is_lower) & of_lanes);
      int32_t row = -1;
      if (token.destinations[i] == rank_) {
        const int local = routes[i].expert - rank_ * call_.num_local_experts;
        row = quotas_.FirstRow(source, local) + routes[i].position;
        if (row < 0 || row >= call_.num_rows) row = -1;
      }
      token.found.rows[i] = row;
      token.found.assignments |= uint64_t{__ballot_sync(kFullWarp, row >= 0)} << (32 * i);
    }
    return token;
  }

  // Called once per token of each rank. Writes its part of the plan.
  template <int kPerLane>
  __device__ void Write(int source, int token, const PlacedToken<kPerLane>& placed) const {
    for (int i = 0; i < kPerLane; ++i) {
      const int k = LaneIndex() + 32 * i;
      const int32_t row = placed.found.rows[i];
      if (row >= 0) WriteRowSource(plan_, row, source, token, k, placed.partial_sum_index);
      if (source != rank_ || k >= call_.top_k) continue;
      const int64_t assignment = int64_t{token} * call_.top_k + k;
      plan_.kept[assignment] = placed.destinations[i] >= 0;
      plan_.destination[assignment] = placed.destinations[i];
    }
  }

 private:
  // Routes come from a peer, so they are checked.
  __device__ int Destination(const Route& route) const {
    const bool is_routed =
        0 <= route.expert && route.expert < call_.num_experts && route.position >= 0;
    return is_routed && route.position < quotas_.Quota(route.expert)
               ? call_.RankOfExpert(route.expert)
               : -1;
  }

  const CallParams& call_;
  const PlanResults& plan_;
  const Quotas& quotas_;
  const int rank_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_ROW_PLACEMENT_CUH_
