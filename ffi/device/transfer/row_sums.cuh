// Sums of rows in float32, as combine needs them: of one rank's experts, and of ranks.
#ifndef JAX_EP_DEVICE_TRANSFER_ROW_SUMS_CUH_
#define JAX_EP_DEVICE_TRANSFER_ROW_SUMS_CUH_

#include "ffi/device/common/vectors.cuh"
#include "ffi/device/ptx/cp_async.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/device/transfer/plan_rows.cuh"

namespace jax_ep {

// A warp's ring in shared memory, in which rows are on their way while others are added: with few
// multiprocessors, what is on its way decides how fast it goes. A lane has the same chunks of every
// row, so what it copies it reads itself, and lanes need not wait for each other.
template <int kStages>
struct SumPipeline {
  static constexpr int kLoads = 2;  // chunks of a lane and row at once: a stage
  static constexpr int kVectorBytes = 16;
  static constexpr int kPitch = 32 * kVectorBytes;  // 32 lanes side by side: no bank conflicts
  static constexpr int kStageBytes = kLoads * kPitch;
  static constexpr int kBytes = kStages * kStageBytes;
};

// Rows and their weights, spread over a warp (AssignmentValue).
template <int kHalves>
struct SumTerms {
  uint64_t which;          // a bit for each that there is
  uint64_t rows[kHalves];  // addresses of the first chunks
  float weights[kHalves];
};

// to[i] = the sum of weight * row[i] over the terms, in order, for chunks i in [first, end). The
// sum of none is zero. Nothing is stored if `to` is null. By one warp.
template <typename Type, int kStages, int kHalves>
__device__ inline void SumRows(const SumTerms<kHalves>& terms, int first, int end, uint4* to) {
  using Ring = SumPipeline<kStages>;
  constexpr int kStep = 32 * Ring::kLoads;
  const int lane = threadIdx.x % 32;
  const uint32_t ring = SharedAddress(DynamicSharedMemory()) + threadIdx.x / 32 * Ring::kBytes +
                        lane * Ring::kVectorBytes;
  const auto next = [](uint32_t stage) { return (stage + 1) % kStages; };

  uint32_t load_stage = 0;
  int load_base = first;
  uint64_t load_left = terms.which;
  // One batch each time, an empty one after the last, so that what to wait for is a constant.
  const auto load = [&] {
    if (load_left != 0 && load_base < end) {
      const auto* const from =
          reinterpret_cast<const uint4*>(AssignmentValue(terms.rows, __ffsll(load_left) - 1));
#pragma unroll
      for (int i = 0; i < Ring::kLoads; ++i) {
        const int chunk = load_base + lane + 32 * i;
        if (chunk >= end) continue;
        CpAsync<Ring::kVectorBytes>(ring + load_stage * Ring::kStageBytes + i * Ring::kPitch,
                                    from + chunk, true);
      }
      load_stage = next(load_stage);
      load_left &= load_left - 1;
      if (load_left == 0) {
        load_left = terms.which;
        load_base += kStep;
      }
    }
    CpAsyncCommitGroup();
  };
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) load();

  uint32_t stage = 0;
#pragma unroll 1
  for (int base = first; base < end; base += kStep) {
    float sums[Ring::kLoads][kPerVector<Type>] = {};
#pragma unroll 1
    for (uint64_t left = terms.which; left != 0; left &= left - 1) {
      // Into the stage whose chunks were added last: the lane has them in registers.
      load();
      CpAsyncWaitGroup<kStages - 1>();
      const float weight = AssignmentValue(terms.weights, __ffsll(left) - 1);
#pragma unroll
      for (int i = 0; i < Ring::kLoads; ++i) {
        if (base + lane + 32 * i >= end) continue;
        float values[kPerVector<Type>];
        UnpackVector<Type>(LoadShared(ring + stage * Ring::kStageBytes + i * Ring::kPitch), values);
#pragma unroll
        for (int j = 0; j < kPerVector<Type>; ++j) {
          sums[i][j] = __fmaf_rn(weight, values[j], sums[i][j]);
        }
      }
      stage = next(stage);
    }
#pragma unroll
    for (int i = 0; i < Ring::kLoads; ++i) {
      const int chunk = base + lane + 32 * i;
      if (to != nullptr && chunk < end) to[chunk] = PackVector<Type>(sums[i]);
    }
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_ROW_SUMS_CUH_
