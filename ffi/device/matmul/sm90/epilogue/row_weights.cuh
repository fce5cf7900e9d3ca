// Row weights of activation epilogues (sm_90): in registers or, with swapped operands, in shared
// memory.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ROW_WEIGHTS_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ROW_WEIGHTS_CUH_

#include "ffi/device/matmul/sm90/epilogue/staging.cuh"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/shapes.h"
#include "ffi/device/ptx/cp_async.cuh"
#include "ffi/device/ptx/mbarrier.cuh"
#include "ffi/device/ptx/shared_memory.cuh"

namespace jax_ep::sm90 {

// The weights of the two rows that a lane has accumulators of.
struct RowWeights {
  float values[2];

  __device__ void Load(const float* weights, const EpilogueCoordinates& at) {
    for (int half = 0; half < 2; ++half) {
      const int m = threadIdx.x % 32 / 4 + 8 * half;
      values[half] = weights != nullptr && m < at.num_m ? weights[at.m + m] : 1.0f;
    }
  }
};

// A lane has accumulators of a quarter of all rows, more weights than it has registers for. So all
// consumer threads copy the weights of a tile to shared memory while it is multiplied: one each.
//
// A copy may overwrite the weights of the tile before the last. All warps have read these: the
// barrier of the last tile waited for copies that a warp makes afterwards.
class SwappedRowWeights {
 public:
  __device__ explicit SwappedRowWeights(const Pipeline& pipeline) : pipeline_(pipeline) {}

  // Begins to copy the weights of a tile. Called once per tile by all consumer threads.
  __device__ void Load(const float* weights, const Tile& tile) const {
    static_assert(kSwappedRows == kConsumerWarps * 32, "each consumer thread copies one");
    const int row = threadIdx.x - kWarpgroupThreads;
    CpAsync<4>(Address(row), weights + tile.m + row, row < tile.num_m);
    CpAsyncMbarrierArrive(pipeline_.RowWeightsBarrier());
  }

  // Waits for the weights and multiplies those of the first kRows rows: accumulators[4 * j + 2 * h
  // + i] of lane l is row 8 * j + 2 * (l % 4) + i.
  template <int kRows = kSwappedRows>
  __device__ void Multiply(float (&accumulators)[kAccumulators]) {
    MbarrierWait(pipeline_.RowWeightsBarrier(), tile_);
#pragma unroll
    for (int j = 0; j < kRows / 8; j += 2) {
      const uint4 four = LoadShared(Address(8 * j + threadIdx.x % 4 * 2));
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        accumulators[4 * j + i] *= __uint_as_float(words[i / 4 * 2 + i % 2]);
      }
    }
    tile_ ^= 1;
  }

  // The same of a wide tile: accumulators[4 * j + 2 * h + i] of lane l is row 8 * h + l / 4 of the
  // warp's 16.
  __device__ void MultiplyWide(float (&accumulators)[kAccumulators], int warp) {
    MbarrierWait(pipeline_.RowWeightsBarrier(), tile_);
    const int row = warp * kWarpM + threadIdx.x % 32 / 4;
    // Both lie in one vector.
    const uint4 four = LoadShared(Address(row & ~1));
    const float weights[2] = {__uint_as_float(row % 2 == 0 ? four.x : four.y),
                              __uint_as_float(row % 2 == 0 ? four.z : four.w)};
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) accumulators[i] *= weights[i / 2 % 2];
    tile_ ^= 1;
  }

 private:
  // The weights of rows r, r + 1, r + 8 and r + 9 lie side by side, as one lane multiplies by them.
  __device__ uint32_t Address(int row) const {
    const int vector = row / 16 * 4 + row % 8 / 2;
    return pipeline_.RowWeightsBuffer(tile_) + vector * 16 + row / 8 % 2 * 8 + row % 2 * 4;
  }

  const Pipeline pipeline_;
  uint32_t tile_ = 0;  // its parity
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ROW_WEIGHTS_CUH_
