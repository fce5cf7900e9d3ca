// The assignments of one token, spread over a warp. With kPerLane 1, lane l holds the assignment of
// top-k index l. With kPerLane 2, it holds those of l and l + 32.
#ifndef JAX_EP_DEVICE_TRANSFER_LANE_ASSIGNMENTS_CUH_
#define JAX_EP_DEVICE_TRANSFER_LANE_ASSIGNMENTS_CUH_

#include "ffi/device/protocol/running_call.cuh"

namespace jax_ep {

static_assert(kMaxTopK <= 64, "a lane holds up to two assignments, and a set of them is 64 bits");
static_assert(kMaxRanks <= 64, "a set of ranks is 64 bits");

// Called by one warp. Returns the value of assignment k in all lanes.
template <int kPerLane, typename T>
__device__ T AssignmentValue(const T (&values)[kPerLane], int k) {
  if constexpr (kPerLane == 1) return __shfl_sync(kFullWarp, values[0], k);
  return __shfl_sync(kFullWarp, k < 32 ? values[0] : values[kPerLane - 1], k % 32);
}

// Called by one warp. Returns the set of ranks among all lanes' destinations; -1 is no rank.
template <int kPerLane>
__device__ inline uint64_t DestinationRanks(const int32_t (&destinations)[kPerLane]) {
  uint32_t low = 0;
  uint32_t high = 0;
  for (int i = 0; i < kPerLane; ++i) {
    const int32_t destination = destinations[i];
    if (destination >= 0) (destination < 32 ? low : high) |= 1u << destination % 32;
  }
  return __reduce_or_sync(kFullWarp, low) | uint64_t{__reduce_or_sync(kFullWarp, high)} << 32;
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
