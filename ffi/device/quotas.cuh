// What every rank works out of all counts: which rows fit, and where each rank's rows of each local
// expert begin.
//
// On overflow every local expert of a destination gets the same cap, the largest with which the
// padded groups fit into its M rows; within an expert every source gets the same quota, the largest
// within the cap.
#ifndef JAX_EP_DEVICE_QUOTAS_CUH_
#define JAX_EP_DEVICE_QUOTAS_CUH_

#include "ffi/device/block.cuh"
#include "ffi/device/call.h"
#include "ffi/device/memory.cuh"
#include "ffi/device/plan.h"

namespace jax_ep {

inline constexpr int32_t kUnlimited = (1 << 30) - 1;

__device__ inline int64_t RoundUp(int64_t value, int32_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The numbers of one destination's experts. Thread i of the block alone reads and writes those of
// experts i, i + kThreads, ..., so no barrier is needed between the steps.
template <int kThreads>
class Destination {
 public:
  __device__ Destination(const Call& call, int32_t row_align, int destination)
      : call_(call),
        row_align_(row_align),
        first_(destination * call.num_local),
        all_counts_(call_.Of<int32_t>(call_.control->rank, kAllCounts) + first_),
        demands_(call_.Of<int32_t>(call_.control->rank, kDemands) + first_),
        quotas_(call_.Of<int32_t>(call_.control->rank, kQuotas) + first_) {}

  // Adds up the counts that the ranks sent; they are checked like every index.
  __device__ void AddRanks() {
    const int32_t most = call_.num_choices();
    for (int local = threadIdx.x; local < call_.num_local; local += kThreads) {
      int32_t demand = 0;
#pragma unroll 4
      for (int source = 0; source < call_.num_ranks; ++source) {
        const int32_t count = max(0, min(LoadShared4(&Count(source, local)), most));
        Count(source, local) = count;
        demand += count;
      }
      demands_[local] = demand;
    }
  }

  __device__ void FindQuotas() {
    const int32_t cap = Fits(kUnlimited) ? kUnlimited : LargestCap();
    for (int local = threadIdx.x; local < call_.num_local; local += kThreads) {
      quotas_[local] = demands_[local] <= cap ? kUnlimited : LargestQuota(local, cap);
    }
  }

  // Of the experts of this rank.
  __device__ void WriteGroups(const PlanResults& plan) {
    int32_t* const first_rows = call_.Of<int32_t>(call_.control->rank, kFirstRows);
    int64_t begin = 0;  // of this round's groups
    int64_t num_received = 0;
    int64_t num_kept = 0;
    for (int base = 0; base < call_.num_local; base += kThreads) {
      const int local = base + threadIdx.x;
      const bool valid = local < call_.num_local;
      int32_t real_size = 0;
      for (int source = 0; valid && source < call_.num_ranks; ++source) {
        real_size += min(Count(source, local), quotas_[local]);
      }
      const int64_t size = RoundUp(real_size, row_align_);
      const PrefixSum offset = PrefixSumOfBlock(size);
      if (valid) {
        const auto row_offset = static_cast<int32_t>(begin + offset.before);
        plan.group_sizes[local] = static_cast<int32_t>(size);
        plan.real_group_sizes[local] = real_size;
        plan.row_offsets[local] = row_offset;
        int32_t row = row_offset;
        for (int source = 0; source < call_.num_ranks; ++source) {
          first_rows[int64_t{source} * call_.num_local + local] = row;
          row += min(Count(source, local), quotas_[local]);
        }
      }
      begin += offset.total;
      num_kept += PrefixSumOfBlock(real_size).total;
      num_received += PrefixSumOfBlock(valid ? demands_[local] : 0).total;
    }
    if (threadIdx.x == 0) {
      plan.row_offsets[call_.num_local] = static_cast<int32_t>(begin);
      *plan.num_received = static_cast<int32_t>(num_received);
      *plan.num_dropped = static_cast<int32_t>(num_received - num_kept);
      *plan.num_bad_ids =
          LoadShared4(all_counts_ - first_ + call_.control->rank * Pitch() + Pitch() - 1);
      *plan.status = 0;
    }
  }

 private:
  __device__ int32_t& Count(int source, int local) { return all_counts_[source * Pitch() + local]; }
  __device__ int64_t Pitch() const { return call_.num_experts + 1; }

  // Whether groups of at most `cap` rows, padded, fit into the rows. The same in all threads.
  __device__ bool Fits(int32_t cap) {
    int64_t rows = 0;
    for (int local = threadIdx.x; local < call_.num_local; local += kThreads) {
      rows += RoundUp(min(demands_[local], cap), row_align_);
    }
    return PrefixSumOfBlock(rows).total <= call_.num_rows;
  }

  __device__ int32_t LargestCap() {
    int32_t cap = 0;
    for (int32_t step = 1 << 29; step > 0; step /= 2) {
      if (Fits(cap + step)) cap += step;
    }
    return cap;
  }

  // For a demand above the cap, which implies that the quota is at most the cap.
  __device__ int32_t LargestQuota(int local, int32_t cap) {
    if (cap == 0) return 0;
    int32_t quota = 0;
    for (int32_t step = 1 << (31 - __clz(cap)); step > 0; step /= 2) {
      int64_t rows = 0;
      for (int source = 0; source < call_.num_ranks; ++source) {
        rows += min(Count(source, local), quota + step);
      }
      if (rows <= cap) quota += step;
    }
    return quota;
  }

  const Call& call_;
  int32_t row_align_;
  int first_;  // the destination's first expert
  int32_t* all_counts_;
  int32_t* demands_;
  int32_t* quotas_;
};

template <int kThreads>
__device__ void WriteSafeGroups(const Call& call, const PlanResults& plan, Outcome outcome) {
  for (int local = threadIdx.x; local <= call.num_local; local += kThreads) {
    plan.row_offsets[local] = 0;
    if (local == call.num_local) break;
    plan.group_sizes[local] = 0;
    plan.real_group_sizes[local] = 0;
  }
  if (threadIdx.x == 0) {
    *plan.num_received = 0;
    *plan.num_dropped = 0;
    *plan.num_bad_ids = 0;
    *plan.status = static_cast<int32_t>(outcome);
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_QUOTAS_CUH_
