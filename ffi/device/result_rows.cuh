// Results of 16 rows and 256 columns in the registers of one warp, stored to memory (sm_90).
//
// The registers are those of wgmma.cuh: of lane l, sums[4 * j + 2 * h + i] is row 8 * h + l / 4,
// column 8 * j + 2 * (l % 4) + i.
#ifndef JAX_EP_DEVICE_RESULT_ROWS_CUH_
#define JAX_EP_DEVICE_RESULT_ROWS_CUH_

#include "ffi/device/async_copy.cuh"
#include "ffi/device/matmul_problem.h"
#include "ffi/device/numbers.cuh"
#include "ffi/device/tensor_core.cuh"

namespace jax_ep {

inline constexpr int kResultN = 256;

// Half of the columns at once, on their way from registers to memory in whole lines.
inline constexpr int kStagedN = kResultN / 2;
inline constexpr int kStagedLine = kStagedN * 2;  // bytes
inline constexpr int kStagedBytes = 16 * kStagedLine;

// Where a chunk of 16 bytes is. Matrices of 8 rows are written and lines read 8 chunks at a time:
// the XOR puts each of them into 8 different columns of banks.
__device__ inline uint32_t StagedChunk(uint32_t staging, int row, int chunk) {
  return staging + row * kStagedLine + (chunk ^ row % 8) * 16;
}

// In 16 bits. `at` is the first element in the result; only num_m rows and num_n columns are
// stored, num_n a multiple of 8. `staging` is the warp's own, of kStagedBytes.
template <typename T>
__device__ void StoreRounded(const MatmulProblem& problem, uint32_t staging, int64_t at, int num_m,
                             int num_n, const float (&sums)[128]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int j = 0; j < kStagedN / 8; j += 2) {
      const float* const from = &sums[4 * (half * kStagedN / 8 + j)];
      const uint32_t words[4] = {T::Pack(from), T::Pack(from + 2), T::Pack(from + 4),
                                 T::Pack(from + 6)};
      StoreMatrices(StagedChunk(staging, lane % 16, j + lane / 16), words);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      const int row = i + lane / 16;
      const int n = half * kStagedN + lane % 16 * 8;
      const uint4 chunk = LoadChunk(StagedChunk(staging, row, lane % 16));
      if (row < num_m && n < num_n) {
        uint16_t* const out = static_cast<uint16_t*>(problem.out);
        *reinterpret_cast<uint4*>(out + at + int64_t{row} * problem.num_n + n) = chunk;
      }
    }
    __syncwarp();
  }
}

// As float32: four neighbouring lanes fill a sector of 32 bytes.
__device__ inline void StoreFloat32(const MatmulProblem& problem, int64_t at, int num_m, int num_n,
                                    const float (&sums)[128]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 8 + lane / 4;
    float* const to = static_cast<float*>(problem.out) + at + int64_t{row} * problem.num_n;
#pragma unroll
    for (int j = 0; j < kResultN / 8; ++j) {
      const int n = 8 * j + lane % 4 * 2;
      if (row < num_m && n < num_n) {
        *reinterpret_cast<float2*>(to + n) =
            make_float2(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]);
      }
    }
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_RESULT_ROWS_CUH_
