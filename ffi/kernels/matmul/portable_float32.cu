// Grouped matmuls of float32 by plain multiply-adds: no operand is rounded to fewer bits.
#include "ffi/device/matmul/block_tiles.cuh"
#include "ffi/device/matmul/element_epilogue.cuh"
#include "ffi/device/ptx/cp_async.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/kernels/matmul/kernels.h"

namespace jax_ep {
namespace {

// A block computes a tile of 128 x 128, a thread 8 x 8 of it: 2 x 2 squares of 4 x 4, 64 apart.
constexpr int kThreads = 256;
constexpr int kTile = 128;
constexpr int kTileK = 8;
constexpr int kStages = 4;
constexpr int kSquare = 4;
constexpr int kThreadsN = kTile / (2 * kSquare);
static_assert(kThreadsN * kThreadsN == kThreads);
static_assert(kTile * kTileK % kThreads == 0, "threads have equal shares of a copy");

// Both operands lie as [k, m or n]. One that is not stored so has 8 lanes write along k: with lines
// of 128 + 4 they reach 8 different banks, and the 4 rows of a warp the banks between these.
constexpr int kPitch = kTile + 4;
struct Stage {
  float left[kTileK][kPitch];
  float right[kTileK][kPitch];
};
static_assert(kPitch * sizeof(float) % 16 == 0, "squares are read as float4");
constexpr int kSharedBytes = kStages * sizeof(Stage);
static_assert(kSharedBytes <= 48 * 1024, "what a block has without asking");

// Element by element, which any alignment allows: a copy is one instruction for 64 multiply-adds.
// `from` is the element of row or column 0 at k = 0; there are `num` of them, and num_k of k. If
// there is `up`, the second half of the tile is the first's columns so much further.
template <bool kHasKInside>
__device__ void Fill(float (*tile)[kPitch], const float* from, int64_t pitch, int num, int num_k,
                     int up = 0) {
#pragma unroll
  for (int i = 0; i < kTile * kTileK / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads;
    const int k = kHasKInside ? index % kTileK : index / kTile;
    const int at = kHasKInside ? index / kTileK : index % kTile;
    const int place = up == 0 ? at : at % (kTile / 2);
    const int offset = place + (at >= kTile / 2 ? up : 0);
    CpAsync<4>(SharedAddress(&tile[k][at]),
               from + (kHasKInside ? at * pitch + k : k * pitch + offset),
               place < num && k < num_k);
  }
}

__device__ void Read(const float (&line)[kPitch], int at, float* values) {
  const float4 square = *reinterpret_cast<const float4*>(&line[at]);
  values[0] = square.x, values[1] = square.y, values[2] = square.z, values[3] = square.w;
}

using Sums = float[2 * kSquare][2 * kSquare];

__device__ void Mma(const Stage& stage, int m, int n, Sums& sums) {
#pragma unroll
  for (int k = 0; k < kTileK; ++k) {
    float left[2 * kSquare];
    float right[2 * kSquare];
    for (int half = 0; half < 2; ++half) {
      Read(stage.left[k], m + half * kTile / 2, left + half * kSquare);
      Read(stage.right[k], n + half * kTile / 2, right + half * kSquare);
    }
#pragma unroll
    for (int i = 0; i < 2 * kSquare; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kSquare; ++j) sums[i][j] = fmaf(left[i], right[j], sums[i][j]);
    }
  }
}

__device__ void Store(const MatmulProblem& problem, const MatmulTile& tile, int m, int n,
                      const Sums& sums) {
#pragma unroll
  for (int i = 0; i < 2 * kSquare; ++i) {
    const int row = m + i / kSquare * (kTile / 2) + i % kSquare;
    if (row >= tile.num_m) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = n + half * kTile / 2;
      const float* const values = sums[i] + half * kSquare;
      float* const to =
          static_cast<float*>(problem.out) + tile.out + int64_t{row} * problem.num_n + column;
      if (problem.out_is_aligned && column < tile.num_n) {
        *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
      } else {
#pragma unroll
        for (int j = 0; j < kSquare; ++j) {
          if (column + j < tile.num_n) to[j] = values[j];
        }
      }
    }
  }
}

// A thread's second square along n is the first's, half a tile further: gate and up.
__device__ void StoreAllActivated(const MatmulProblem& problem, const MatmulTile& tile, int m,
                                  int n, const Sums& sums) {
  const bool is_gated = problem.epilogue.activation.is_gated;
#pragma unroll
  for (int i = 0; i < 2 * kSquare; ++i) {
    const int row = m + i / kSquare * (kTile / 2) + i % kSquare;
    if (row >= tile.num_m) break;
#pragma unroll
    for (int j = 0; j < 2 * kSquare; ++j) {
      const int column = n + j / kSquare * (kTile / 2) + j % kSquare;
      if (column >= tile.num_n || (is_gated && j >= kSquare)) break;
      StoreActivated<Float32>(problem, tile.group, tile.row + row, tile.n + column, sums[i][j],
                              sums[i][(j + kSquare) % (2 * kSquare)]);
    }
  }
}

}  // namespace

template <MatmulKind kKind>
__global__ void __launch_bounds__(kThreads, 1)
    Float32Kernel(const __grid_constant__ MatmulProblem problem) {
  constexpr bool kLeftHasKInside = !kIsRhsGradient<kKind>;
  constexpr bool kRightHasKInside = kIsTransposed<kKind>;
  const int up = kIsActivation<kKind> && problem.epilogue.activation.is_gated ? problem.num_n : 0;
  Stage* const stages = reinterpret_cast<Stage*>(DynamicSharedMemory());
  const int m = threadIdx.x / kThreadsN * kSquare;
  const int n = threadIdx.x % kThreadsN * kSquare;
  const float* const left = static_cast<const float*>(problem.left.data);
  const float* const right = static_cast<const float*>(problem.right.data);

  MatmulTiles<kKind, kTile> tiles(problem);
  for (MatmulTile tile; tiles.Next(&tile);) {
    // Zeros for steps past the end, so that the count of batches says which have arrived.
    const auto fill = [&](int step) {
      Stage& stage = stages[step % kStages];
      const int64_t k = int64_t{step} * kTileK;
      const int num_k = tile.num_k - step * kTileK;
      Fill<kLeftHasKInside>(stage.left,
                            left + tile.left + k * (kLeftHasKInside ? 1 : problem.left.pitch),
                            problem.left.pitch, tile.num_m, num_k);
      Fill<kRightHasKInside>(stage.right,
                             right + tile.right + k * (kRightHasKInside ? 1 : problem.right.pitch),
                             problem.right.pitch, tile.num_n, num_k, up);
      CpAsyncCommitGroup();
    };
    const int num_steps = CeilDivide(tile.num_k, kTileK);
    if (num_steps > 0) {
      for (int step = 0; step < kStages - 1; ++step) fill(step);
    }
    Sums sums = {};
    for (int step = 0; step < num_steps; ++step) {
      CpAsyncWaitGroup<kStages - 2>();
      __syncthreads();           // others' copies arrived, and all are done with the step before,
      fill(step + kStages - 1);  // into whose stage this goes
      Mma(stages[step % kStages], m, n, sums);
    }
    // All are done with the stages, and so are the copies of zeros: the next tile fills them.
    CpAsyncWaitGroup<0>();
    __syncthreads();
    if constexpr (kIsActivation<kKind>) {
      StoreAllActivated(problem, tile, m, n, sums);
    } else {
      Store(problem, tile, m, n, sums);
    }
  }
}

template __global__ void Float32Kernel<MatmulKind::kForward>(const __grid_constant__ MatmulProblem);
template __global__ void Float32Kernel<MatmulKind::kForwardTransposed>(
    const __grid_constant__ MatmulProblem);
template __global__ void Float32Kernel<MatmulKind::kRhsGradient>(
    const __grid_constant__ MatmulProblem);
template __global__ void Float32Kernel<MatmulKind::kActivation>(
    const __grid_constant__ MatmulProblem);

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

namespace {

const void* KernelAddress(MatmulKind kind) {
  switch (kind) {
    case MatmulKind::kForward:
      return reinterpret_cast<const void*>(Float32Kernel<MatmulKind::kForward>);
    case MatmulKind::kForwardTransposed:
      return reinterpret_cast<const void*>(Float32Kernel<MatmulKind::kForwardTransposed>);
    case MatmulKind::kRhsGradient:
      return reinterpret_cast<const void*>(Float32Kernel<MatmulKind::kRhsGradient>);
    case MatmulKind::kActivation:
      return reinterpret_cast<const void*>(Float32Kernel<MatmulKind::kActivation>);
    case MatmulKind::kActivationGradient:
      break;  // in two kernels
  }
  return nullptr;
}

}  // namespace

MatmulKernel Float32MatmulKernel(MatmulKind kind) {
  return {.address = KernelAddress(kind),
          .threads = kThreads,
          .shared_bytes = kSharedBytes,
          .tile_m = kTile,
          .tile_n = kTile,
          .stored_elements = kSquare};
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
