// The arrays of a plan on the device. R ranks, E experts, L local experts, T tokens per rank, top-k
// K, M rows.
#ifndef JAX_EP_DEVICE_TRANSFER_PLAN_H_
#define JAX_EP_DEVICE_TRANSFER_PLAN_H_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Written by dispatch, in the order of its results.
struct PlanResults {
  int32_t* group_sizes;       // [L], padded
  int32_t* real_group_sizes;  // [L]
  int32_t* row_offsets;       // [L + 1]
  int32_t* row_source;        // [M, 3]: rank, token, top-k index; -1 for padding and tail
  int32_t*
      partial_sum_index;  // [M]: this rank's index among the ranks that the row's token goes to
  bool* kept;             // [T, K]
  int32_t* destination;   // [T, K]: rank; -1 if unrouted or dropped
  int32_t* num_received;  // [1]
  int32_t* num_dropped;   // [1]
  int32_t* num_bad_ids;   // [1]
  int32_t* status;        // [1]
};

// Read by redispatch and combine.
struct PlanOperands {
  const int32_t* row_offsets;
  const int32_t* row_source;
  const int32_t* partial_sum_index;  // combine only
  const int32_t* destination;
  const int32_t* status;
};

// The arrays that only a plan of two levels has. D domains of N ranks each; a rank's rail partners
// are the ranks with its index in the other domains.
struct ForwardingResults {
  uint32_t* token_ranks;       // [D, T, ceil(N / 32)]: for each token of the rail partner in each
                               // domain, and of this rank, the ranks here that got one, as bits
  int32_t* partial_sum_index;  // [M]: as the plan's, among the ranks of this domain; -1 likewise
};
struct ForwardingOperands {
  const uint32_t* token_ranks;
  const int32_t* partial_sum_index;
};

// The shared memory of Quotas (quotas.cuh), in 32-bit words.
constexpr int64_t QuotaWords(int64_t num_ranks, int64_t num_experts) {
  return 3 * num_experts + 3 * (num_experts / num_ranks) + 5;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_PLAN_H_
