// The plan of a low-latency dispatch. Every block computes it from all ranks' assignments: these
// are few, and waiting for another block would take longer.
#ifndef JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_BLOCK_PLAN_CUH_
#define JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_BLOCK_PLAN_CUH_

#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/transfer/dispatch/expert_bins.cuh"
#include "ffi/device/transfer/dispatch/quotas.cuh"
#include "ffi/device/transfer/low_latency/row_segments.cuh"

namespace jax_ep {

// Lives in the shared memory of a role of kThreads threads, whose last kCountingWarps warps count.
// Bins are the experts, and one for bad ids.
template <int kThreads>
class BlockPlan {
 public:
  __device__ BlockPlan(const CallParams& call, const RoleContext& role,
                       const AssignmentRanges& ranges, const FastDivmod& row_align, int rank)
      : call_(call),
        role_(role),
        ranges_(ranges),
        routes_(reinterpret_cast<Route*>(role.shared)),
        range_counts_(
            reinterpret_cast<int32_t*>(routes_ + call_.num_ranks * call_.num_assignments())),
        totals_(range_counts_ + call_.num_ranks * ranges_.count * NumBins()),
        quotas_(call, row_align, rank, totals_ + call_.num_ranks * NumBins()) {}

  __device__ static bool IsCounter(const RoleContext& role) {
    return role.Warp() >= kThreads / 32 - kCountingWarps;
  }

  // Called by the counting warps; all lanes of a warp return the same. Counts the assignments as
  // they arrive.
  __device__ Outcome Collect(const EagerBuffers& eager, uint64_t sequence) {
    const ProfileSpan span(SpanKind::kCountAssignments);
    const int counter = role_.Warp() - (kThreads / 32 - kCountingWarps);
    const int num_ranges = call_.num_ranks * ranges_.count;
#pragma unroll 1
    for (int range = counter; range < num_ranges; range += kCountingWarps) {
      const Outcome outcome = CountRange(eager, sequence, range);
      if (outcome != Outcome::kArrived) return outcome;
    }
    return Outcome::kArrived;
  }

  // Called by all threads, between barriers. Computes the quotas from the counts.
  __device__ void Compute() {
    const ProfileSpan span(SpanKind::kPlan);
    ScanRanges();
    role_.Sync();
    quotas_.Compute(role_.BlockThreads(),
                    [&](int source, int expert) { return totals_[source * NumBins() + expert]; });
  }

  __device__ const Quotas& quotas() const { return quotas_; }

  // Returns the route of a rank's assignment.
  __device__ Route AssignmentRoute(int rank, int assignment) const {
    Route route = routes_[rank * call_.num_assignments() + assignment];
    const int range = rank * ranges_.count + (assignment >> ranges_.log2_assignments);
    if (route.expert >= 0) {
      route.position += range_counts_[range * NumBins() + route.expert];
    }
    return route;
  }

 private:
  static constexpr int kPerLane = 4;  // packets in flight per lane

  __device__ int NumBins() const { return call_.num_experts + 1; }

  // Stores each assignment's expert and position within the range, and the range's counts.
  __device__ Outcome CountRange(const EagerBuffers& eager, uint64_t sequence, int range) {
    const int lane = LaneIndex();
    const int source = range / ranges_.count;
    const int begin = range % ranges_.count << ranges_.log2_assignments;
    const int end = min(begin + (1 << ranges_.log2_assignments), call_.num_assignments());
    const AssignmentPacket* const packets =
        eager.Local().packets() + source * call_.num_assignments();
    Route* const routes = routes_ + source * call_.num_assignments();
    int32_t* const counts = range_counts_ + range * NumBins();
#pragma unroll 1
    for (int bin = lane; bin < NumBins(); bin += 32) counts[bin] = 0;
    __syncwarp();
#pragma unroll 1
    for (int base = begin + lane; base - lane < end; base += 32 * kPerLane) {
      int32_t ids[kPerLane];
      const Outcome outcome = WaitForSegments(call_, sequence, [&] {  // WAIT_SEGMENT
        uint32_t missing = kMaxRanks;
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
          if (base + 32 * j >= end) continue;
          uint64_t packed;
          uint64_t tag;
          LoadRelaxedSystem(&packets[base + 32 * j], &packed, &tag);
          ids[j] = static_cast<int32_t>(packed);
          if (tag != eager.tag()) missing = source;
        }
        return missing;
      });
      if (outcome != Outcome::kArrived) return outcome;
#pragma unroll
      for (int j = 0; j < kPerLane; ++j) {
        const bool is_valid = base + 32 * j < end;
        const int bin = is_valid ? ExpertBin(call_, ids[j]) : -1;
        const int32_t position = CountInOrder(counts, bin);
        if (!is_valid) continue;
        routes[base + 32 * j] = {bin < call_.num_experts ? bin : -1, position};
      }
    }
    return Outcome::kArrived;
  }

  // Sums each bin. Replaces the counts of ranges by their first positions among the source's
  // assignments.
  __device__ void ScanRanges() {
#pragma unroll 1
    for (int bin = role_.Thread(); bin < NumBins(); bin += kThreads) {
      int32_t* count = range_counts_ + bin;
      int32_t demand = 0;
#pragma unroll 1
      for (int source = 0; source < call_.num_ranks; ++source) {
        int32_t sum = 0;
#pragma unroll 1
        for (int range = 0; range < ranges_.count; ++range, count += NumBins()) {
          const int32_t before = sum;
          sum += *count;
          *count = before;
        }
        totals_[source * NumBins() + bin] = sum;
        quotas_.SetCount(source, bin, sum);
        demand += sum;
      }
      if (bin < call_.num_experts) quotas_.SetDemand(bin, demand);
    }
  }

  const CallParams& call_;
  const RoleContext& role_;
  const AssignmentRanges ranges_;
  Route* const routes_;          // [R][T * K], positions within ranges
  int32_t* const range_counts_;  // [R][ranges][bins]
  int32_t* const totals_;        // [R][bins]
  Quotas quotas_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_BLOCK_PLAN_CUH_
