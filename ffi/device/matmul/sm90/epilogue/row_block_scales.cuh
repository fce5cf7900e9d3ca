// Scales of the sm_90 FP8 matmul for weight gradients, whose k runs over the rows of a group.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ROW_BLOCK_SCALES_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ROW_BLOCK_SCALES_CUH_

#include "ffi/device/matmul/sm90/epilogue/fp8_scales.cuh"

namespace jax_ep::sm90 {

// Scales of 1 x 128 blocks of a, and of 128 x 128 blocks of b. A k-block is a row block, numbered
// through all groups, and has the scales of its own one after another.
struct RowBlockScales : BlockScales {
  static constexpr bool kContractsRows = true;

  // Loads this lane's part of four k-blocks from `first` on. Those past the group's end are not
  // used. Past the last row block, and in rows past the end of the matrix, scales are 0, and so are
  // the results of groups without rows.
  __device__ static KBlockScales Load(const Fp8Scales& scales, const EpilogueCoordinates& at,
                                      int first) {
    KBlockScales result = {};
    const int k_block = first + threadIdx.x % kQuad;
    if (k_block >= scales.k_blocks) return result;
    const int row = threadIdx.x % 32 / kQuad;
    const float* const rows = scales.a + int64_t{k_block} * scales.a_stride + at.m + row;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row + 8 * h < at.num_m) result.rows[h] = __ldg(rows + 8 * h);
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int n_block = at.n / kFp8Block + half;
      if (n_block < scales.n_blocks) {
        result.halves[half] = __ldg(scales.b + int64_t{k_block} * scales.n_blocks + n_block);
      }
    }
    return result;
  }
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_ROW_BLOCK_SCALES_CUH_
