// Staging buffer of matmuls with swapped operands (sm_90): takes results from the registers of all
// consumer warps, which have 16 columns of every row, to warps that store 16 rows.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_SWAPPED_STAGING_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_SWAPPED_STAGING_CUH_

#include "ffi/device/matmul/sm90/epilogue/staging.cuh"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/shapes.h"
#include "ffi/device/ptx/mbarrier.cuh"

namespace jax_ep::sm90 {

// The second half of a lane's accumulators has the rows past the buffer's, or the columns of the
// second half of a wide tile.
__device__ inline bool HasSecondHalf(const EpilogueCoordinates& at) {
  return at.second_half_columns > 0 || at.num_m > kSwappedBufferRows;
}
__device__ inline void BeginSecondHalf(EpilogueCoordinates* at) {
  if (at->second_half_columns > 0) {
    at->n += at->second_half_columns;
  } else {
    at->m += kSwappedBufferRows;
    at->num_m -= kSwappedBufferRows;
  }
}

// The buffer has 128 rows of 128 columns in 16 bits, in two halves of 64 columns: one half per
// consumer warpgroup. Warps go through it in rounds, all of them in the same ones:
//
//   Fill             puts this warp's 16 columns of all rows there, once the round before has ended
//   Publish          tells the other warps; may come later than Fill, where its fence costs less
//   WaitUntilStaged  waits for the columns of all warps; then the warp has 16 rows, in two boxes
//   Rows().Store     stores boxes
//   EndRound         waits until TMA has read the warp's boxes
//
// All functions are called by whole warps. A slice or more lies between the steps of a round, so
// that no warp waits long for the others.
class SwappedStaging {
 public:
  static constexpr bool kHasColumnPairs = false;

  __device__ SwappedStaging(const Pipeline& pipeline, int consumer_warp)
      : staged_(pipeline.StagedBarrier()),
        stored_(pipeline.StoredBarrier()),
        rows_(pipeline.Staging(0) + consumer_warp * kStagingBoxBytes) {
    const int lane = threadIdx.x % 32;
    // stmatrix: four words of a lane are 16 rows of two vectors of 8 columns. The XOR puts 8 rows
    // of a vector into 8 different bank columns.
    const int vector = consumer_warp % kWarpgroupWarps * 2 + lane / 8 % 2;
    columns_ = pipeline.Staging(0) + consumer_warp / kWarpgroupWarps * kHalfBytes +
               (lane / 16 * 8 + lane % 8) * kSwizzleBytes + (vector ^ lane % 8) * 16;
  }

  // Word 2 * j + h of lane l is rows 8 * j + 2 * (l % 4) and the next, column 8 * h + l / 4.
  __device__ void Fill(const uint32_t (&words)[kStagingWords], bool has_columns = true) const {
    WaitUntilStored();
    if (has_columns) {
#pragma unroll
      for (int i = 0; i < kStagingWords; i += 4) {
        const uint32_t some[4] = {words[i], words[i + 1], words[i + 2], words[i + 3]};
        StMatrixTransposed(columns_ + i / 4 * 16 * kSwizzleBytes, some);
      }
    }
  }

  // The same of a wide tile, of which this warp has 16 rows: word 2 * j + h of lane l is row 8 * h
  // + l / 4, columns 8 * j + 2 * (l % 4) and the next.
  __device__ void FillRows(const uint32_t (&words)[kStagingWords]) const {
    WaitUntilStored();
#pragma unroll
    for (int i = 0; i < kStagingWords; i += 4) {
      const uint32_t some[4] = {words[i], words[i + 1], words[i + 2], words[i + 3]};
      rows_.WriteWords(i, some);
    }
  }

  __device__ void Publish() const {
    FenceProxyAsyncShared();
    __syncwarp();
    if (ElectOne()) MbarrierArrive(staged_);
    __syncwarp();
  }

  __device__ void WaitUntilStaged() const { MbarrierWait(staged_, parity_); }

  // The 16 rows of this warp. Their boxes lie in the two halves of the buffer.
  using RowStaging = EpilogueStaging<kConsumerWarps * kStagingBoxBytes>;
  __device__ const RowStaging& Rows() const { return rows_; }

  __device__ void EndRound() {
    if (ElectOne()) {
      BulkWaitGroupRead<0>();
      MbarrierArrive(stored_);
    }
    __syncwarp();
    parity_ ^= 1;
  }

 protected:
  static constexpr uint32_t kHalfBytes = kConsumerWarps * kStagingBoxBytes;

  // Waits until the round before has ended.
  __device__ void WaitUntilStored() const { MbarrierWait(stored_, parity_ ^ 1); }

 private:
  const uint32_t staged_;
  const uint32_t stored_;
  const RowStaging rows_;
  uint32_t columns_;
  uint32_t parity_ = 0;
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_SWAPPED_STAGING_CUH_
