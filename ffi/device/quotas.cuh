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
#include "ffi/device/plan.h"

namespace jax_ep {

inline constexpr int32_t kUnlimited = (1 << 30) - 1;

__device__ inline int64_t RoundUp(int64_t value, int32_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Counts and what follows from them: of a workspace, or of a block that works for itself in shared
// memory.
struct CountTables {
  int32_t* counts;      // [R][E + 1]: each rank's choices of each expert; then its bad ids
  int32_t* demands;     // [E]: their sums over the ranks
  int32_t* quotas;      // [E]: rows of an expert that one rank may send
  int32_t* first_rows;  // [R][E / R]: where each rank's rows of each local expert begin

  __device__ static CountTables OfWorkspace(const Call& call) {
    const int rank = call.control->rank;
    return {call.Of<int32_t>(rank, kAllCounts), call.Of<int32_t>(rank, kDemands),
            call.Of<int32_t>(rank, kQuotas), call.Of<int32_t>(rank, kFirstRows)};
  }
};

// Whether all rows that there can be fit into a rank's rows.
__device__ inline bool AlwaysFit(const Call& call, int32_t row_align) {
  const int64_t most =
      int64_t{call.num_ranks} * call.num_choices() + int64_t{call.num_local} * (row_align - 1);
  return most <= call.num_rows;
}

// The numbers of one destination's experts. Thread i of the block alone reads and writes those of
// experts i, i + kThreads, ..., so no barrier is needed between the steps.
template <int kThreads>
class Destination {
 public:
  __device__ Destination(const Call& call, const CountTables& tables, int32_t row_align,
                         int destination)
      : call_(call),
        tables_(tables),
        row_align_(row_align),
        counts_(tables.counts + destination * call.num_local),
        demands_(tables.demands + destination * call.num_local),
        quotas_(tables.quotas + destination * call.num_local) {}

  // Adds up the counts that the ranks sent; they are checked like every index.
  __device__ void AddRanks() {
    const int32_t most = call_.num_choices();
    for (int local = threadIdx.x; local < call_.num_local; local += kThreads) {
      int32_t demand = 0;
      ForEachCount(local, [&](int source, int32_t count) {
        count = max(0, min(count, most));
        Count(source, local) = count;
        demand += count;
      });
      demands_[local] = demand;
    }
  }

  __device__ void FindQuotas() {
    const int32_t cap =
        AlwaysFit(call_, row_align_) || Fits(kUnlimited) ? kUnlimited : LargestCap();
    for (int local = threadIdx.x; local < call_.num_local; local += kThreads) {
      quotas_[local] = demands_[local] <= cap ? kUnlimited : LargestQuota(local, cap);
    }
  }

  // Of the experts of this rank.
  __device__ void WriteGroups(const PlanResults& plan) {
    int64_t begin = 0;  // of this round's groups
    int64_t num_received = 0;
    int64_t num_kept = 0;
    for (int base = 0; base < call_.num_local; base += kThreads) {
      const int local = base + threadIdx.x;
      const bool valid = local < call_.num_local;
      int32_t real_size = 0;
      const int32_t quota = valid ? quotas_[local] : 0;
      if (valid) {
        ForEachCount(local, [&](int, int32_t count) { real_size += min(count, quota); });
      }
      const int64_t size = RoundUp(real_size, row_align_);
      const PrefixSum offset = PrefixSumOfBlock(size);
      if (valid) {
        const auto row_offset = static_cast<int32_t>(begin + offset.before);
        plan.group_sizes[local] = static_cast<int32_t>(size);
        plan.real_group_sizes[local] = real_size;
        plan.row_offsets[local] = row_offset;
        int32_t row = row_offset;
        ForEachCount(local, [&](int source, int32_t count) {
          tables_.first_rows[int64_t{source} * call_.num_local + local] = row;
          row += min(count, quota);
        });
      }
      begin += offset.total;
      // Two sums at once: neither reaches 31 bits.
      const int64_t both =
          PrefixSumOfBlock(valid ? demands_[local] | int64_t{real_size} << 32 : 0).total;
      num_received += both & 0x7fffffff;
      num_kept += both >> 32;
    }
    if (threadIdx.x == 0) {
      plan.row_offsets[call_.num_local] = static_cast<int32_t>(begin);
      *plan.num_received = static_cast<int32_t>(num_received);
      *plan.num_dropped = static_cast<int32_t>(num_received - num_kept);
      *plan.num_bad_ids = tables_.counts[call_.control->rank * Pitch() + Pitch() - 1];
      *plan.status = 0;
    }
  }

 private:
  __device__ int32_t& Count(int source, int local) { return counts_[source * Pitch() + local]; }
  __device__ int64_t Pitch() const { return call_.num_experts + 1; }

  // In the order of the sources; some are read before the first is used, because memory is far.
  // What AddRanks stored is seen: this thread did.
  template <typename Use>
  __device__ void ForEachCount(int local, Use use) {
    constexpr int kAtOnce = 8;
    for (int first = 0; first < call_.num_ranks; first += kAtOnce) {
      int32_t counts[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < call_.num_ranks) counts[i] = Count(first + i, local);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < call_.num_ranks) use(first + i, counts[i]);
      }
    }
  }

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
  const CountTables& tables_;
  int32_t row_align_;
  int32_t* counts_;  // of the destination's experts; the others likewise
  int32_t* demands_;
  int32_t* quotas_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_QUOTAS_CUH_
