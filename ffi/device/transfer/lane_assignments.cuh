// The assignments of one token, spread over a warp. With kPerLane 1, lane l holds the assignment of
// top-k index l. With kPerLane 2, it holds those of l and l + 32.
#ifndef JAX_EP_DEVICE_TRANSFER_LANE_ASSIGNMENTS_CUH_
#define JAX_EP_DEVICE_TRANSFER_LANE_ASSIGNMENTS_CUH_

#include "ffi/device/protocol/running_call.cuh"

namespace jax_ep {

static_assert(kMaxTopK <= 64, "a lane holds up to two assignments, and a set of them is 64 bits");

// Called by one warp. Returns the value of assignment k in all lanes.
template <int kPerLane, typename T>
__device__ T AssignmentValue(const T (&values)[kPerLane], int k) {
  if constexpr (kPerLane == 1) return __shfl_sync(kFullWarp, values[0], k);
  return __shfl_sync(kFullWarp, k < 32 ? values[0] : values[kPerLane - 1], k % 32u);
}

// Called by one warp. Returns the set of assignments that are a token's first to their rank, so one
// for each of its ranks. `destinations` are ranks; -1 is none.
template <int kPerLane>
__device__ inline uint64_t FirstAssignments(const int32_t (&destinations)[kPerLane]) {
  const uint32_t lower = (1u << LaneIndex()) - 1;
  const auto is_first = [&](int32_t destination) {
    const uint32_t same = __match_any_sync(kFullWarp, destination);
    return destination >= 0 && (same & lower) == 0;
  };
  const uint32_t firsts = __ballot_sync(kFullWarp, is_first(destinations[0]));
  if constexpr (kPerLane == 1) return firsts;
  int32_t second = destinations[kPerLane - 1];
  if (!__any_sync(kFullWarp, second >= 0)) return firsts;  // top_k is at most 32
#pragma unroll 1
  for (uint32_t left = firsts; left != 0; left &= left - 1) {
    if (__shfl_sync(kFullWarp, destinations[0], __ffs(left) - 1) == second) second = -1;
  }
  return firsts | uint64_t{__ballot_sync(kFullWarp, is_first(second))} << 32;
}

// The rows of one token on this rank, -1 where an assignment has none.
template <int kPerLane>
struct TokenRowsPerLane {
  int32_t rows[kPerLane];
  uint64_t assignments;  // the set of assignments that have a row; the same in all lanes

  __device__ int32_t Row(int k) const { return AssignmentValue(rows, k); }
};
using TokenRows = TokenRowsPerLane<2>;

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_LANE_ASSIGNMENTS_CUH_
