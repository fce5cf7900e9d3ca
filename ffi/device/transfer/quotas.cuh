// What every block works out of all ranks' counts: which rows fit, and where each rank's rows of
// each local expert begin.
//
// On overflow every local expert of a destination gets the same cap, the largest with which the
// padded groups fit into its M rows; within an expert every source gets the same quota, the largest
// within the cap.
#ifndef JAX_EP_DEVICE_TRANSFER_QUOTAS_CUH_
#define JAX_EP_DEVICE_TRANSFER_QUOTAS_CUH_

#include "ffi/device/protocol/call.h"
#include "ffi/device/transfer/plan_rows.cuh"

namespace jax_ep {

inline constexpr int32_t kUnlimited = kMaxItems;

// In shared memory of a block: QuotaWords (small.h). Numbers that fit 32 bits: there are at most
// 2^30 choices, and padding adds less than row_align, which is 2^30 at most, to a group.
class Quotas {
 public:
  __device__ Quotas(const Call& call, const FastDivmod& row_align, int rank, int32_t* shared)
      : call_(call), row_align_(row_align), rank_(rank), first_expert_(rank * call.num_local) {
    const auto take = [&](int count) {
      int32_t* const taken = shared;
      shared += count;
      return taken;
    };
    demands_ = take(call.num_experts);
    quotas_ = take(call.num_experts);
    first_rows_ = take(call.num_experts);
    groups_.group_sizes = take(call.num_local);
    groups_.real_group_sizes = take(call.num_local);
    groups_.row_offsets = take(call.num_local + 1);
    groups_.num_received = take(1);
    groups_.num_dropped = take(1);
    groups_.num_bad_ids = take(1);
    groups_.status = take(1);
  }

  // ---- what has to be known, before a barrier

  // All ranks' choices of an expert.
  __device__ void SetDemand(int expert, int32_t demand) {
    demands_[expert] = demand;
    quotas_[expert] = kUnlimited;
  }

  // A rank's; those of bad ids follow the last expert's.
  __device__ void SetCount(int source, int expert, int32_t count) {
    const int local = expert - first_expert_;
    if (0 <= local && local < call_.num_local) FirstRow(source, local) = count;
    if (expert == call_.num_experts && source == rank_) *groups_.num_bad_ids = count;
  }

  // ---- and what follows, before another

  // By whole warps of the block. count_of(source, expert) is asked for if rows do not fit.
  template <typename CountOf>
  __device__ void Find(const ThreadGroup& threads, CountOf count_of) {
#pragma unroll 1
    for (int i = threads.number / 32; i < call_.num_ranks; i += threads.count / 32) {
      const int destination = call_.RankAfter(rank_, i);
      FindQuotas(destination * call_.num_local, count_of);
      if (i == 0) NumberGroups();
    }
  }

  // ---- results

  __device__ int32_t QuotaOf(int expert) const { return quotas_[expert]; }

  // Of a rank's rows of a local expert.
  __device__ int32_t& FirstRow(int source, int local) const {
    return first_rows_[source * call_.num_local + local];
  }

  // `plan` with what is known of the groups here.
  __device__ PlanResults WithGroups(const PlanResults& plan) const {
    PlanResults with_groups = groups_;
    with_groups.row_source = plan.row_source;
    with_groups.partial_sum_index = plan.partial_sum_index;
    with_groups.kept = plan.kept;
    with_groups.destination = plan.destination;
    return with_groups;
  }

  // For all blocks, by one.
  __device__ void WriteGroups(const PlanResults& plan, const ThreadGroup& threads) const {
#pragma unroll 1
    for (int local = threads.number; local <= call_.num_local; local += threads.count) {
      plan.row_offsets[local] = groups_.row_offsets[local];
      if (local == call_.num_local) break;
      plan.group_sizes[local] = groups_.group_sizes[local];
      plan.real_group_sizes[local] = groups_.real_group_sizes[local];
    }
    if (threads.number == 0) {
      *plan.num_received = *groups_.num_received;
      *plan.num_dropped = *groups_.num_dropped;
      *plan.num_bad_ids = *groups_.num_bad_ids;
      *plan.status = *groups_.status;
    }
  }

 private:
  // The others by one warp each.

  template <typename CountOf>
  __device__ void FindQuotas(int first_expert, CountOf count_of) {
    const int64_t most = int64_t{call_.num_ranks} * call_.num_assignments() +
                         int64_t{call_.num_local} * (row_align_.divisor() - 1);
    if (most <= call_.num_rows || Fits(first_expert, kUnlimited)) return;
    int32_t cap = 0;
#pragma unroll 1
    for (int32_t step = 1 << 29; step > 0; step /= 2) {
      if (Fits(first_expert, cap + step)) cap += step;
    }
#pragma unroll 1
    for (int local = threadIdx.x % 32; local < call_.num_local; local += 32) {
      const int expert = first_expert + local;
      if (demands_[expert] > cap) quotas_[expert] = LargestQuota(expert, cap, count_of);
    }
    __syncwarp();  // NumberGroups reads other lanes'
  }

  __device__ int32_t Padded(int32_t rows) const {
    const int32_t unit = row_align_.divisor();
    return row_align_.Quotient(rows + unit - 1) * unit;
  }

  // Whether groups of at most `cap` rows, padded, fit into the rows.
  __device__ bool Fits(int first_expert, int32_t cap) const {
    int64_t rows = 0;
#pragma unroll 1
    for (int local = threadIdx.x % 32; local < call_.num_local; local += 32) {
      rows += Padded(min(demands_[first_expert + local], cap));
    }
#pragma unroll 1
    for (int lanes = 16; lanes > 0; lanes /= 2) rows += __shfl_xor_sync(kFullWarp, rows, lanes);
    return rows <= call_.num_rows;
  }

  // For a demand above the cap, which implies that the quota is at most the cap. By single lanes.
  template <typename CountOf>
  __device__ int32_t LargestQuota(int expert, int32_t cap, CountOf count_of) const {
    if (cap == 0) return 0;
    int32_t quota = 0;
#pragma unroll 1
    for (int32_t step = 1 << (31 - __clz(cap)); step > 0; step /= 2) {
      int64_t rows = 0;
#pragma unroll 8
      for (int source = 0; source < call_.num_ranks; ++source) {
        rows += min(count_of(source, expert), quota + step);
      }
      if (rows <= cap) quota += step;
    }
    return quota;
  }

  // This rank's groups: each lane has some experts that follow each other. Where a source's rows
  // begin, its count was until now.
  __device__ void NumberGroups() {
    const int lane = threadIdx.x % 32;
    const int share = CeilDivide(call_.num_local, 32);
    const int begin = min(lane * share, call_.num_local);
    const int end = min(begin + share, call_.num_local);
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
    uint32_t through = size;  // with those of lower lanes
#pragma unroll 1
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t lower = __shfl_up_sync(kFullWarp, through, distance);
      if (lane >= distance) through += lower;
      num_received += __shfl_xor_sync(kFullWarp, num_received, distance);
      num_kept += __shfl_xor_sync(kFullWarp, num_kept, distance);
    }
    auto group_begin = static_cast<int32_t>(through - size);
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
    groups_.row_offsets[call_.num_local] = static_cast<int32_t>(through);
    *groups_.num_received = static_cast<int32_t>(num_received);
    *groups_.num_dropped = static_cast<int32_t>(num_received - num_kept);
    *groups_.status = 0;
  }

  const Call& call_;
  const FastDivmod& row_align_;
  const int rank_;
  const int first_expert_;  // of this rank
  int32_t* demands_;        // [E]: all ranks' choices
  int32_t* quotas_;         // [E]: rows that one rank may send
  int32_t* first_rows_;     // [R][L]
  PlanResults groups_ = {};
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_QUOTAS_CUH_
