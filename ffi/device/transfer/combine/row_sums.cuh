// Weighted sums of rows in float32, for combine's partial sums and their reduction.
#ifndef JAX_EP_DEVICE_TRANSFER_COMBINE_ROW_SUMS_CUH_
#define JAX_EP_DEVICE_TRANSFER_COMBINE_ROW_SUMS_CUH_

#include "ffi/device/protocol/peer_stores.cuh"
#include "ffi/device/ptx/cp_async.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/ptx/vectors.cuh"
#include "ffi/device/transfer/plan_rows.cuh"

namespace jax_ep {

// A warp's pipeline in shared memory: rows are loaded while others are added. On few SMs the bytes
// in flight determine the speed. A lane has the same vectors of every row. It reads only what it
// copied itself, so lanes need not synchronize.
template <int kStages>
struct SumPipeline {
  // The role's warps have their pipelines at the begin of its shared memory.
  __device__ explicit SumPipeline(const RoleContext& role)
      : address(SharedAddress(role.shared) + role.Warp() * kBytes + LaneIndex() * kVectorBytes) {}

  uint32_t address;  // this lane's first vector

  static constexpr int kLoads = 2;  // vectors per lane and stage
  static constexpr int kVectorBytes = 16;
  static constexpr int kPitch = 32 * kVectorBytes;  // 32 lanes side by side: no bank conflicts
  static constexpr int kStageBytes = kLoads * kPitch;
  static constexpr int kBytes = kStages * kStageBytes;
};

// Rows and their weights, spread over a warp (lane_assignments.cuh).
template <int kPerLane>
struct SumTerms {
  uint64_t assignments;     // the set of terms
  uint64_t rows[kPerLane];  // addresses of the first vectors
  float weights[kPerLane];
};

// The sum of the inner terms, which are the first ones, is rounded to a row, to which the others
// are added. All weights are 1.
template <int kPerLane>
struct NestedSumTerms : SumTerms<kPerLane> {
  int num_inner;
};

// Called by one warp. Moves the terms to the first places, in order, where one shuffle finds each.
// Returns how many there are.
template <int kPerLane>
__device__ inline int PackTerms(SumTerms<kPerLane>* terms) {
  const uint64_t set = terms->assignments;
  const int count = __popcll(set);
  if ((set & (set + 1)) == 0) return count;  // they are there
  SumTerms<kPerLane> packed = *terms;
  uint64_t left = set;
#pragma unroll 1
  for (int term = 0; term < count; ++term, left &= left - 1) {
    const int k = __ffsll(left) - 1;
    const uint64_t row = AssignmentValue(terms->rows, k);
    const float weight = AssignmentValue(terms->weights, k);
    for (int i = 0; i < kPerLane; ++i) {
      if (LaneIndex() + 32 * i != term) continue;
      packed.rows[i] = row;
      packed.weights[i] = weight;
    }
  }
  *terms = packed;
  return count;
}

// Called by one warp. Stores to[i], the sum of weight * row[i] over the terms in order, for the
// vectors i of [first, end). An empty sum is zero. Stores nothing if `to` is null.
template <typename Type, int kStages, typename Terms>
__device__ inline void SumRows(const SumPipeline<kStages>& pipeline, Terms terms, int first,
                               int end, PeerPointer<uint4> to) {
  using Pipeline = SumPipeline<kStages>;
  constexpr int kStep = 32 * Pipeline::kLoads;
  const int lane = LaneIndex();
  const auto next = [](uint32_t stage) { return (stage + 1) % kStages; };
  const int count = PackTerms(&terms);
  const auto row_of = [&](int term) {
    return reinterpret_cast<const uint4*>(AssignmentValue(terms.rows, term));
  };

  uint32_t load_stage = 0;
  int load_base = count > 0 ? first : end;
  int load_term = 0;
  const uint4* load_row = row_of(0);
  // Commits one group per call, empty after the last load, so that the count to wait for is
  // constant. The next row is found meanwhile.
  const auto load = [&] {
    if (load_base < end) {
#pragma unroll
      for (int i = 0; i < Pipeline::kLoads; ++i) {
        const int vector = load_base + lane + 32 * i;
        if (vector >= end) continue;
        CpAsync<Pipeline::kVectorBytes>(
            pipeline.address + load_stage * Pipeline::kStageBytes + i * Pipeline::kPitch,
            load_row + vector, true);
      }
      load_stage = next(load_stage);
      if (++load_term == count) {
        load_term = 0;
        load_base += kStep;
      }
      load_row = row_of(load_term);
    }
    CpAsyncCommitGroup();
  };
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) load();

  uint32_t stage = 0;
#pragma unroll 1
  for (int base = first; base < end; base += kStep) {
    float sums[Pipeline::kLoads][kPerVector<Type>] = {};
#pragma unroll 1
    for (int term = 0; term < count; ++term) {
      const float weight = AssignmentValue(terms.weights, term);
      // Reuses the stage that was added last: the lane has its vectors in registers.
      load();
      CpAsyncWaitGroup<kStages - 1>();
      float values[Pipeline::kLoads][kPerVector<Type>];  // past the end they do not count
#pragma unroll
      for (int i = 0; i < Pipeline::kLoads; ++i) {
        UnpackVector<Type>(
            LoadShared(pipeline.address + stage * Pipeline::kStageBytes + i * Pipeline::kPitch),
            values[i]);
      }
#pragma unroll
      for (int i = 0; i < Pipeline::kLoads; ++i) {
#pragma unroll
        for (int j = 0; j < kPerVector<Type>; ++j) {
          sums[i][j] = __fmaf_rn(weight, values[i][j], sums[i][j]);
        }
      }
      if constexpr (requires { terms.num_inner; }) {
        // Added to +0 the row would stay as it is: a sum of rows that begins with +0 is never -0.
        for (int i = 0; term + 1 == terms.num_inner && i < Pipeline::kLoads; ++i) {
          UnpackVector<Type>(PackVector<Type>(sums[i]), sums[i]);
        }
      }
      stage = next(stage);
    }
#pragma unroll
    for (int i = 0; i < Pipeline::kLoads; ++i) {
      const int vector = base + lane + 32 * i;
      if (to && vector < end) StoreToPeer(to + vector, PackVector<Type>(sums[i]));
    }
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_COMBINE_ROW_SUMS_CUH_
