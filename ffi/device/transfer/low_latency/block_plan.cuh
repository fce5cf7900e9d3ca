// The plan of a small dispatch, which every block works out for itself from all ranks' choices:
// what it reads is little, and waiting for another block would take longer.
#ifndef JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_BLOCK_PLAN_CUH_
#define JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_BLOCK_PLAN_CUH_

#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/transfer/counting.cuh"
#include "ffi/device/transfer/low_latency/row_segments.cuh"
#include "ffi/device/transfer/quotas.cuh"

namespace jax_ep {

// In the dynamic shared memory of a block of kThreads, the last of whose warps count. Bins are the
// experts, and one for bad ids.
template <int kThreads>
class BlockPlan {
 public:
  __device__ BlockPlan(const Call& call, const AssignmentRanges& stretches,
                       const FastDivmod& row_align, int rank)
      : call_(call),
        stretches_(stretches),
        routes_(reinterpret_cast<Route*>(DynamicSharedMemory())),
        stretch_counts_(
            reinterpret_cast<int32_t*>(routes_ + call_.num_ranks * call_.num_assignments())),
        totals_(stretch_counts_ + call_.num_ranks * stretches_.count * NumBins()),
        quotas_(call, row_align, rank, totals_ + call_.num_ranks * NumBins()) {}

  __device__ static bool IsCounter() { return threadIdx.x / 32 >= kThreads / 32 - kCountingWarps; }

  // Collects and counts the choices, as they come. By the warps that count; all lanes of a warp
  // return the same.
  __device__ Outcome Collect(const EagerBuffers& halves, uint64_t sequence) {
    const int counter = threadIdx.x / 32 - (kThreads / 32 - kCountingWarps);
    const int num_stretches = call_.num_ranks * stretches_.count;
#pragma unroll 1
    for (int stretch = counter; stretch < num_stretches; stretch += kCountingWarps) {
      const Outcome outcome = CountStretch(halves, sequence, stretch);
      if (outcome != Outcome::kArrived) return outcome;
    }
    return Outcome::kArrived;
  }

  // All that follows. By all threads, between barriers.
  __device__ void Number() {
    AddBins();
    __syncthreads();
    quotas_.Find(ThreadGroup::Block(),
                 [&](int source, int expert) { return totals_[source * NumBins() + expert]; });
  }

  __device__ const Quotas& quotas() const { return quotas_; }

  // Of a rank's choice.
  __device__ Route RouteOf(int rank, int choice) const {
    Route route = routes_[rank * call_.num_assignments() + choice];
    const int stretch = rank * stretches_.count + (choice >> stretches_.log2_assignments);
    if (route.expert >= 0) {
      route.position += stretch_counts_[stretch * NumBins() + route.expert];
    }
    return route;
  }

 private:
  static constexpr int kAtOnce = 4;  // packets of a lane

  __device__ int NumBins() const { return call_.num_experts + 1; }

  // Leaves each choice's position among those of its expert in the stretch, and the counts.
  __device__ Outcome CountStretch(const EagerBuffers& halves, uint64_t sequence, int stretch) {
    const int lane = threadIdx.x % 32;
    const int source = stretch / stretches_.count;
    const int begin = stretch % stretches_.count << stretches_.log2_assignments;
    const int end = min(begin + (1 << stretches_.log2_assignments), call_.num_assignments());
    const AssignmentPacket* const packets =
        halves.Mine().packets() + source * call_.num_assignments();
    Route* const routes = routes_ + source * call_.num_assignments();
    int32_t* const counts = stretch_counts_ + stretch * NumBins();
#pragma unroll 1
    for (int bin = lane; bin < NumBins(); bin += 32) counts[bin] = 0;
    __syncwarp();
#pragma unroll 1
    for (int base = begin + lane; base - lane < end; base += 32 * kAtOnce) {
      int32_t ids[kAtOnce];
      const Outcome outcome = WaitForSegments(call_, sequence, [&] {  // WAIT_SEGMENT
        uint32_t missing = kMaxRanks;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (base + 32 * j >= end) continue;
          uint64_t choice;
          uint64_t tag;
          LoadRelaxedSystem(&packets[base + 32 * j], &choice, &tag);
          ids[j] = static_cast<int32_t>(choice);
          if (tag != halves.tag()) missing = source;
        }
        return missing;
      });
      if (outcome != Outcome::kArrived) return outcome;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const bool is_there = base + 32 * j < end;
        const int bin = is_there ? BinOf(call_, ids[j]) : -1;
        const int32_t position = CountInOrder(counts, bin);
        if (!is_there) continue;
        routes[base + 32 * j] = {bin < call_.num_experts ? bin : -1, position};
      }
    }
    return Outcome::kArrived;
  }

  // Adds up each bin: its stretches' counts become where their choices begin among the source's.
  __device__ void AddBins() {
#pragma unroll 1
    for (int bin = threadIdx.x; bin < NumBins(); bin += kThreads) {
      int32_t* count = stretch_counts_ + bin;
      int32_t demand = 0;
#pragma unroll 1
      for (int source = 0; source < call_.num_ranks; ++source) {
        int32_t sum = 0;
#pragma unroll 1
        for (int part = 0; part < stretches_.count; ++part, count += NumBins()) {
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

  const Call& call_;
  const AssignmentRanges stretches_;
  Route* const routes_;            // [R][T * K], positions within stretches
  int32_t* const stretch_counts_;  // [R][stretches][bins]
  int32_t* const totals_;          // [R][bins]
  Quotas quotas_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_BLOCK_PLAN_CUH_
