// Which rows fit, and where they go. Every block of a dispatch derives this from the counts of all
// ranks.
//
// On overflow, every local expert of a destination gets the same cap: the largest one with which
// the padded groups fit into its M rows. Within an expert, every source rank gets the same quota:
// the largest one within the cap.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_QUOTAS_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_QUOTAS_CUH_

#include "ffi/device/protocol/role_context.cuh"
#include "ffi/device/protocol/running_call.cuh"
#include "ffi/device/transfer/plan.h"

namespace jax_ep {

inline constexpr int32_t kUnlimited = kMaxItems;

// Lives in QuotaWords of shared memory. Row counts fit 32 bits: there are at most 2^30 assignments,
// and padding adds less than row_align, at most 2^30, to a group.
class Quotas {
 public:
  __device__ Quotas(const CallParams& call, const FastDivmod& row_align, int rank, int32_t* shared)
      : call_(call),
        row_align_(row_align),
        rank_(rank),
        first_expert_(rank * call.num_local_experts) {
    const auto take = [&](int count) {
      int32_t* const taken = shared;
      shared += count;
      return taken;
    };
    demands_ = take(call.num_experts);
    quotas_ = take(call.num_experts);
    first_rows_ = take(call.num_experts);
    groups_.group_sizes = take(call.num_local_experts);
    groups_.real_group_sizes = take(call.num_local_experts);
    groups_.row_offsets = take(call.num_local_experts + 1);
    groups_.num_received = take(1);
    groups_.num_dropped = take(1);
    groups_.num_bad_ids = take(1);
    groups_.status = take(1);
  }

  // Step 1: the caller sets all demands and counts, and synchronizes the block.

  // Sets the number of assignments of all ranks to an expert.
  __device__ void SetDemand(int expert, int32_t demand) {
    demands_[expert] = demand;
    quotas_[expert] = kUnlimited;
  }

  // Sets the number of assignments of one rank to an expert. Expert num_experts stands for bad ids.
  __device__ void SetCount(int source, int expert, int32_t count) {
    const int local = expert - first_expert_;
    if (0 <= local && local < call_.num_local_experts) FirstRow(source, local) = count;
    if (expert == call_.num_experts && source == rank_) *groups_.num_bad_ids = count;
  }

  // Step 2: whole warps compute the quotas, and synchronize the block. count(source, expert) is
  // called only if rows do not fit.
  template <typename Count>
  __device__ void Compute(const ThreadGroup& threads, Count count) {
#pragma unroll 1
    for (int i = threads.index / 32; i < call_.num_ranks; i += threads.size / 32) {
      const int destination = call_.RankAfter(rank_, i);
      ComputeQuotas(destination * call_.num_local_experts, count);
      if (i == 0) LayOutGroups();
    }
  }

  // Step 3: the results.

  // Returns the rows that each rank may send to an expert.
  __device__ int32_t Quota(int expert) const { return quotas_[expert]; }

  // Returns the first row of a source rank in the group of a local expert.
  __device__ int32_t& FirstRow(int source, int local) const {
    return first_rows_[source * call_.num_local_experts + local];
  }

  // Returns `plan` with the groups' arrays in shared memory.
  __device__ PlanResults PlanWithGroups(const PlanResults& plan) const {
    PlanResults with_groups = groups_;
    with_groups.row_source = plan.row_source;
    with_groups.partial_sum_index = plan.partial_sum_index;
    with_groups.kept = plan.kept;
    with_groups.destination = plan.destination;
    return with_groups;
  }

  // Called by one block of the grid. Writes the groups to the plan.
  __device__ void WriteGroups(const PlanResults& plan, const ThreadGroup& threads) const {
#pragma unroll 1
    for (int local = threads.index; local <= call_.num_local_experts; local += threads.size) {
      plan.row_offsets[local] = groups_.row_offsets[local];
      if (local == call_.num_local_experts) break;
      plan.group_sizes[local] = groups_.group_sizes[local];
      plan.real_group_sizes[local] = groups_.real_group_sizes[local];
    }
    if (threads.index == 0) {
      *plan.num_received = *groups_.num_received;
      *plan.num_dropped = *groups_.num_dropped;
      *plan.num_bad_ids = *groups_.num_bad_ids;
      *plan.status = *groups_.status;
    }
  }

 private:
  // The functions below are called by one warp.

  template <typename Count>
  __device__ void ComputeQuotas(int first_expert, Count count) {
    const int64_t max_rows = int64_t{call_.num_ranks} * call_.num_assignments() +
                             int64_t{call_.num_local_experts} * (row_align_.divisor() - 1);
    if (max_rows <= call_.num_rows || Fits(first_expert, kUnlimited)) return;
    int32_t cap = 0;
#pragma unroll 1
    for (int32_t step = 1 << 29; step > 0; step /= 2) {
      if (Fits(first_expert, cap + step)) cap += step;
    }
#pragma unroll 1
    for (int local = LaneIndex(); local < call_.num_local_experts; local += 32) {
      const int expert = first_expert + local;
      if (demands_[expert] > cap) quotas_[expert] = LargestQuota(expert, cap, count);
    }
    __syncwarp();  // LayOutGroups reads quotas of other lanes
  }

  __device__ int32_t Padded(int32_t rows) const {
    const int32_t align = row_align_.divisor();
    return row_align_.Quotient(rows + align - 1) * align;
  }

  // Returns whether the groups fit into M rows with this cap.
  __device__ bool Fits(int first_expert, int32_t cap) const {
    int64_t rows = 0;
#pragma unroll 1
    for (int local = LaneIndex(); local < call_.num_local_experts; local += 32) {
      rows += Padded(min(demands_[first_expert + local], cap));
    }
#pragma unroll 1
    for (int lanes = 16; lanes > 0; lanes /= 2) rows += __shfl_xor_sync(kFullWarp, rows, lanes);
    return rows <= call_.num_rows;
  }

  // Called by one lane, for a demand above the cap. Then the quota is at most the cap.
  template <typename Count>
  __device__ int32_t LargestQuota(int expert, int32_t cap, Count count) const {
    if (cap == 0) return 0;
    int32_t quota = 0;
#pragma unroll 1
    for (int32_t step = 1 << (31 - __clz(cap)); step > 0; step /= 2) {
      int64_t rows = 0;
#pragma unroll 8
      for (int source = 0; source < call_.num_ranks; ++source) {
        rows += min(count(source, expert), quota + step);
      }
      if (rows <= cap) quota += step;
    }
    return quota;
  }

  // Computes sizes and offsets of this rank's groups; each lane has a range of experts. Replaces
  // the counts of SetCount by first rows.
  __device__ void LayOutGroups() {
    const int lane = LaneIndex();
    const int per_lane = CeilDivide(call_.num_local_experts, 32);
    const int begin = min(lane * per_lane, call_.num_local_experts);
    const int end = min(begin + per_lane, call_.num_local_experts);
    uint32_t size = 0;
    uint32_t num_received = 0;
    uint32_t num_kept = 0;
#pragma unroll 1
    for (int local = begin; local < end; ++local) {
      const int32_t demand = demands_[first_expert_ + local];
      const int32_t quota = quotas_[first_expert_ + local];
      int32_t real_size = demand;
      if (demand > quota) {
        real_size = 0;
#pragma unroll 1
        for (int source = 0; source < call_.num_ranks; ++source) {
          real_size += min(FirstRow(source, local), quota);
        }
      }
      groups_.real_group_sizes[local] = real_size;
      groups_.group_sizes[local] = Padded(real_size);
      size += groups_.group_sizes[local];
      num_received += demand;
      num_kept += real_size;
    }
    uint32_t inclusive_sum = size;  // over the lanes
#pragma unroll 1
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t lower = __shfl_up_sync(kFullWarp, inclusive_sum, distance);
      if (lane >= distance) inclusive_sum += lower;
      num_received += __shfl_xor_sync(kFullWarp, num_received, distance);
      num_kept += __shfl_xor_sync(kFullWarp, num_kept, distance);
    }
    auto group_begin = static_cast<int32_t>(inclusive_sum - size);
#pragma unroll 1
    for (int local = begin; local < end; ++local) {
      groups_.row_offsets[local] = group_begin;
      const int32_t quota = quotas_[first_expert_ + local];
      int32_t row = group_begin;
      group_begin += groups_.group_sizes[local];
#pragma unroll 1
      for (int source = 0; source < call_.num_ranks; ++source) {
        const int32_t count = FirstRow(source, local);
        FirstRow(source, local) = row;
        row += min(count, quota);
      }
    }
    if (lane != 31) return;
    groups_.row_offsets[call_.num_local_experts] = static_cast<int32_t>(inclusive_sum);
    *groups_.num_received = static_cast<int32_t>(num_received);
    *groups_.num_dropped = static_cast<int32_t>(num_received - num_kept);
    *groups_.status = 0;
  }

  const CallParams& call_;
  const FastDivmod& row_align_;
  const int rank_;
  const int first_expert_;  // this rank's
  int32_t* demands_;        // [E]: assignments of all ranks
  int32_t* quotas_;         // [E]: rows that each rank may send
  int32_t* first_rows_;     // [R][L]: counts until LayOutGroups
  PlanResults groups_ = {};
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_QUOTAS_CUH_
