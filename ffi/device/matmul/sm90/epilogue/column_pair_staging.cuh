// The staging buffer of results whose columns have the order of LhsGradientColumn (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_COLUMN_PAIR_STAGING_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_COLUMN_PAIR_STAGING_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/epilogue/swapped_staging.cuh"
#include "ffi/device/matmul/sm90/mxfp4_lhs_gradient_shapes.h"
#include "ffi/device/ptx/shared_memory.cuh"

namespace jax_ep::sm90 {

// A lane has two adjacent columns of each of its rows: accumulators[4 * j + 2 * h + i] is row 8 * j
// + 2 * (l % 4) + i, column h of the pair.
class ColumnPairStaging : public SwappedStaging {
 public:
  static constexpr bool kHasColumnPairs = true;

  __device__ ColumnPairStaging(const Pipeline& pipeline, int consumer_warp)
      : SwappedStaging(pipeline, consumer_warp),
        column_(LhsGradientColumn(consumer_warp, threadIdx.x % 32)) {
    const int row = threadIdx.x % 4 * 2;
    const int byte = column_ % kColumnBlock * 2;
    pair_ = pipeline.Staging(0) + column_ / kColumnBlock * kHalfBytes + row * kSwizzleBytes +
            (byte ^ row * 16);
  }

  // Rounds half `half` of a lane's accumulators: word 2 * j + i is the pair of row 8 * j + i.
  template <typename T>
  __device__ static void PackHalf(const float (&accumulators)[kAccumulators], int half,
                                  uint32_t (&words)[kStagingWords]) {
#pragma unroll
    for (int word = 0; word < kStagingWords; ++word) {
      const int first = 2 * half * kStagingWords + word / 2 * 4 + word % 2;
      const float pair[] = {accumulators[first], accumulators[first + 2]};
      words[word] = T::Pack(pair);
    }
  }

  // The XOR of TMA's swizzle and LhsGradientPair put a warp's words into all banks.
  __device__ void Fill(const uint32_t (&words)[kStagingWords], bool /*has_columns*/ = true) const {
    WaitUntilStored();
#pragma unroll
    for (int i = 0; i < kStagingWords; i += 2) {
      const uint32_t to = pair_ + i / 2 * 8 * kSwizzleBytes;
      StoreShared(to, words[i]);
      StoreShared((to ^ 16) + kSwizzleBytes, words[i + 1]);
    }
  }

  // Stores float32 results to memory, without the buffer.
  __device__ void StoreFloat32(const MatmulParams& params, const EpilogueCoordinates& at,
                               const float (&accumulators)[kAccumulators]) const {
    const int column = at.n + column_;
    if (column >= params.shape_n) return;
    const int first = threadIdx.x % 4 * 2;
    float* const out =
        static_cast<float*>(params.out) + int64_t{at.m + first} * params.shape_n + column;
#pragma unroll
    for (int i = 0; i < kAccumulators / 2; ++i) {
      const int row = i / 2 * 8 + i % 2;
      if (first + row >= at.num_m) continue;
      *reinterpret_cast<float2*>(out + int64_t{row} * params.shape_n) =
          make_float2(accumulators[i / 2 * 4 + i % 2], accumulators[i / 2 * 4 + i % 2 + 2]);
    }
  }

 private:
  const int column_;  // in the tile
  uint32_t pair_;
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_COLUMN_PAIR_STAGING_CUH_
