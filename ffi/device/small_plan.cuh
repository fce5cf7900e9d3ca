// The plan of a small dispatch, which every block works out for itself from all ranks' choices:
// what it reads is little, and waiting for another block would take longer.
#ifndef JAX_EP_DEVICE_SMALL_PLAN_CUH_
#define JAX_EP_DEVICE_SMALL_PLAN_CUH_

#include "ffi/device/async_copy.cuh"
#include "ffi/device/counting.cuh"
#include "ffi/device/quotas.cuh"
#include "ffi/device/small_memory.cuh"

namespace jax_ep {

// Apart, because it is rare (wait.cuh). By all threads of a block.
template <int kThreads>
__device__ __noinline__ void NumberWithQuotas(const Call& call, CountTables tables,
                                              int32_t row_align, PlanResults groups) {
  for (int i = 0; i < call.num_ranks; ++i) {
    Destination<kThreads> numbers(call, tables, row_align, i);
    numbers.FindQuotas();
    if (i == call.control->rank) numbers.WriteGroups(groups);
  }
  __syncthreads();
}

// In the dynamic shared memory of a block of kThreads, the last of whose warps count. Bins are the
// experts, and one for bad ids.
template <int kThreads>
class SmallPlan {
 public:
  __device__ SmallPlan(const Call& call, const SmallStretches& stretches, int rank)
      : call_(call), stretches_(stretches), rank_(rank) {
    const int num_experts = call.num_experts;
    routes_ = reinterpret_cast<Route*>(DynamicSharedMemory());
    int32_t* next = reinterpret_cast<int32_t*>(routes_ + call.num_ranks * call.num_choices());
    const auto take = [&](int count) {
      int32_t* const taken = next;
      next += count;
      return taken;
    };
    stretch_counts_ = take(call.num_ranks * stretches.count * NumBins());
    tables_.counts = take(call.num_ranks * NumBins());
    tables_.demands = take(num_experts);
    tables_.quotas = take(num_experts);
    tables_.first_rows = take(num_experts);
    overflows_ = take(1);
    groups_.group_sizes = take(call.num_local);
    groups_.real_group_sizes = take(call.num_local);
    groups_.row_offsets = take(call.num_local + 1);
    groups_.num_received = take(1);
    groups_.num_dropped = take(1);
    groups_.num_bad_ids = take(1);
    groups_.status = take(1);
  }

  __device__ static bool IsCounter() { return threadIdx.x / 32 >= kThreads / 32 - kCountingWarps; }

  // Collects and counts the choices, as they come. By the warps that count; all lanes of a warp
  // return the same.
  __device__ Outcome Collect(const SmallMemory& memory, uint64_t epoch) {
    const int counter = threadIdx.x / 32 - (kThreads / 32 - kCountingWarps);
    if (counter == 0 && threadIdx.x % 32 == 0) *overflows_ = 0;
    const int num_stretches = call_.num_ranks * stretches_.count;
#pragma unroll 1
    for (int stretch = counter; stretch < num_stretches; stretch += kCountingWarps) {
      const Outcome outcome = CountStretch(memory, epoch, stretch);
      if (outcome != Outcome::kArrived) return outcome;
    }
    return Outcome::kArrived;
  }

  // The quotas of all destinations, and this rank's groups. By all threads, after a barrier.
  __device__ void Number(int32_t row_align, const Divisor& by_row_align) {
    const int warp = threadIdx.x / 32;
    AddBins();
    __syncthreads();
#pragma unroll 1
    for (int i = warp; i < call_.num_ranks; i += kThreads / 32) {
      FindOverflow(row_align, by_row_align, i);
    }
    if (warp == kThreads / 32 - 1) NumberGroups(row_align, by_row_align);
    __syncthreads();
    if (*overflows_ != 0) NumberWithQuotas<kThreads>(call_, tables_, row_align, groups_);
  }

  __device__ const CountTables& tables() const { return tables_; }

  // `plan` with the numbers of groups that this block found.
  __device__ PlanResults WithGroups(const PlanResults& plan) const {
    PlanResults with_groups = groups_;
    with_groups.row_source = plan.row_source;
    with_groups.row_slot = plan.row_slot;
    with_groups.kept = plan.kept;
    with_groups.destination = plan.destination;
    return with_groups;
  }

  // For all blocks: by one.
  __device__ void WriteGroups(const PlanResults& plan) const {
#pragma unroll 1
    for (int local = threadIdx.x; local <= call_.num_local; local += kThreads) {
      plan.row_offsets[local] = groups_.row_offsets[local];
      if (local == call_.num_local) break;
      plan.group_sizes[local] = groups_.group_sizes[local];
      plan.real_group_sizes[local] = groups_.real_group_sizes[local];
    }
    if (threadIdx.x == 0) {
      *plan.num_received = *groups_.num_received;
      *plan.num_dropped = *groups_.num_dropped;
      *plan.num_bad_ids = *groups_.num_bad_ids;
      *plan.status = *groups_.status;
    }
  }

  // Of a rank's choice.
  __device__ Route RouteOf(int rank, int choice) const {
    Route route = routes_[rank * call_.num_choices() + choice];
    const int stretch = rank * stretches_.count + (choice >> stretches_.log2_choices);
    if (route.expert >= 0) {
      route.position += stretch_counts_[stretch * NumBins() + route.expert];
    }
    return route;
  }

 private:
  static constexpr int kAtOnce = 4;  // packets of a lane

  __device__ int NumBins() const { return call_.num_experts + 1; }

  // Leaves each choice's position among those of its expert in the stretch, and the counts.
  __device__ Outcome CountStretch(const SmallMemory& memory, uint64_t epoch, int stretch) {
    const int lane = threadIdx.x % 32;
    const int source = stretch / stretches_.count;
    const int begin = stretch % stretches_.count << stretches_.log2_choices;
    const int end = min(begin + (1 << stretches_.log2_choices), call_.num_choices());
    const Packet* const packets = memory.Mine().packets() + source * call_.num_choices();
    Route* const routes = routes_ + source * call_.num_choices();
    int32_t* const counts = stretch_counts_ + stretch * NumBins();
#pragma unroll 1
    for (int bin = lane; bin < NumBins(); bin += 32) counts[bin] = 0;
    __syncwarp();
#pragma unroll 1
    for (int base = begin + lane; base - lane < end; base += 32 * kAtOnce) {
      int32_t ids[kAtOnce];
      const Outcome outcome = WaitForPieces(call_, epoch, [&] {  // WAIT_PIECE
        uint32_t missing = kMaxPeers;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (base + 32 * j >= end) continue;
          uint64_t choice;
          uint64_t tag;
          LoadRelaxedSystem(&packets[base + 32 * j], &choice, &tag);
          ids[j] = static_cast<int32_t>(choice);
          if (tag != memory.tag()) missing = source;
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
        tables_.counts[source * NumBins() + bin] = sum;
        demand += sum;
      }
      if (bin == call_.num_experts) break;
      tables_.demands[bin] = demand;
      tables_.quotas[bin] = kUnlimited;
    }
  }

  // Of one expert, a number that fits 32 bits.
  __device__ int32_t RowsOfGroup(int expert, int32_t row_align, const Divisor& by_row_align) const {
    return by_row_align.Quotient(tables_.demands[expert] + row_align - 1) * row_align;
  }

  // Whether a destination has too few rows. By one warp.
  __device__ void FindOverflow(int32_t row_align, const Divisor& by_row_align, int destination) {
    if (AlwaysFit(call_, row_align)) return;
    int64_t rows = 0;
#pragma unroll 1
    for (int local = threadIdx.x % 32; local < call_.num_local; local += 32) {
      rows += RowsOfGroup(destination * call_.num_local + local, row_align, by_row_align);
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) rows += __shfl_xor_sync(kWholeWarp, rows, lanes);
    if (threadIdx.x % 32 == 0 && rows > call_.num_rows) *overflows_ = 1;
  }

  // This rank's, if all have their rows; else the numbers are found again. By one warp, whose lanes
  // have some experts each.
  __device__ void NumberGroups(int32_t row_align, const Divisor& by_row_align) {
    const int lane = threadIdx.x % 32;
    const int first = rank_ * call_.num_local;
    const int share = (call_.num_local + 31) / 32;
    const int begin = min(lane * share, call_.num_local);
    const int end = min(begin + share, call_.num_local);
    uint32_t size = 0;
    uint32_t received = 0;
#pragma unroll 1
    for (int local = begin; local < end; ++local) {
      size += RowsOfGroup(first + local, row_align, by_row_align);
      received += tables_.demands[first + local];
    }
    uint32_t through = size;  // with those of lower lanes
#pragma unroll 1
    for (int distance = 1; distance < 32; distance *= 2) {
      const uint32_t lower = __shfl_up_sync(kWholeWarp, through, distance);
      if (lane >= distance) through += lower;
      received += __shfl_xor_sync(kWholeWarp, received, distance);
    }
    auto group_begin = static_cast<int32_t>(through - size);
#pragma unroll 1
    for (int local = begin; local < end; ++local) {
      groups_.group_sizes[local] = RowsOfGroup(first + local, row_align, by_row_align);
      groups_.real_group_sizes[local] = tables_.demands[first + local];
      groups_.row_offsets[local] = group_begin;
      int32_t row = group_begin;
      group_begin += groups_.group_sizes[local];
#pragma unroll 1
      for (int source = 0; source < call_.num_ranks; ++source) {
        tables_.first_rows[source * call_.num_local + local] = row;
        row += tables_.counts[source * NumBins() + first + local];
      }
    }
    if (lane != 31) return;
    groups_.row_offsets[call_.num_local] = static_cast<int32_t>(through);
    *groups_.num_received = static_cast<int32_t>(received);
    *groups_.num_dropped = 0;
    *groups_.num_bad_ids = tables_.counts[rank_ * NumBins() + call_.num_experts];
    *groups_.status = 0;
  }

  const Call& call_;
  const SmallStretches stretches_;
  const int rank_;
  Route* routes_;            // [R][T * K], positions within stretches
  int32_t* stretch_counts_;  // [R][stretches][bins]
  int32_t* overflows_;       // [1]: whether any destination has too few rows
  CountTables tables_;
  PlanResults groups_ = {};
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_SMALL_PLAN_CUH_
