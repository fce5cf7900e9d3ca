// Grouped matmul of float32 operands with FMAs: no operand is rounded to TF32. For sm_80 and newer.
//
// A persistent kernel: each block computes every gridDim.x-th tile of 128 x 128, each of its
// threads 8 x 8 of it. Per tile:
//
//   1. All threads fill a ring of kStages stages in shared memory with cp.async. A stage holds one
//      k-block of a and b, both as [k][m or n].
//   2. Each thread multiplies its 8 rows by its 8 columns, one k after another.
//   3. The epilogue stores the accumulators from registers to global memory.
#include "ffi/device/matmul/portable/epilogue.cuh"
#include "ffi/device/matmul/portable/tile_scheduler.cuh"
#include "ffi/device/ptx/cp_async.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/kernels/matmul/portable/kernels.h"

namespace jax_ep::portable {
namespace {

constexpr int kThreads = 256;
constexpr int kTile = 128;  // both m and n
constexpr int kTileK = 8;
constexpr int kStages = 4;
static_assert(kStages >= 3, "one stage is filled, one is read, and one is in flight");
static_assert(kTile * kTileK % kThreads == 0, "all threads copy the same number of elements");

// A thread's 8 x 8 elements are 2 x 2 squares of 4 x 4. The squares are half a tile apart, so that
// a thread has the gate and the up of its columns.
constexpr int kSquare = 4;
constexpr int kThreadsN = kTile / (2 * kSquare);
static_assert(kThreadsN * kThreadsN == kThreads, "the threads' squares cover the tile");

// The padding avoids bank conflicts when an operand that is stored as [m or n][k] is transposed:
// 8 threads write along k then. With rows of 128 + 4 words they hit banks that are 4 apart, and the
// warp's 4 elements along m or n the banks in between.
constexpr int kRowStride = kTile + 4;
struct Stage {
  float a[kTileK][kRowStride];
  float b[kTileK][kRowStride];
};
static_assert(kRowStride * sizeof(float) % 16 == 0, "squares are read as float4");
constexpr int kSharedBytes = kStages * sizeof(Stage);
static_assert(kSharedBytes <= 48 * 1024, "the limit without an opt-in");

// Copies a k-block of an operand, one element per cp.async: that suits any alignment, and there are
// 64 FMAs per copy. `from` points to the element at m or n = 0 and k = 0. Of m or n `num` elements
// are valid, of k `num_k`; the others become zeros. If up_offset is not 0, the second half of the
// tile holds the up columns of the first half's gate columns, which are so much further.
template <bool kIsKMajor>
__device__ void Fill(float (*tile)[kRowStride], const float* from, int64_t row_stride, int num,
                     int num_k, int up_offset = 0) {
#pragma unroll
  for (int i = 0; i < kTile * kTileK / kThreads; ++i) {
    const int index = threadIdx.x + i * kThreads;
    const int k = kIsKMajor ? index % kTileK : index / kTile;
    const int mn = kIsKMajor ? index / kTileK : index % kTile;
    const int gate = up_offset == 0 ? mn : mn % (kTile / 2);
    const int column = gate + (mn >= kTile / 2 ? up_offset : 0);
    CpAsync<4>(SharedAddress(&tile[k][mn]),
               from + (kIsKMajor ? mn * row_stride + k : k * row_stride + column),
               gate < num && k < num_k);
  }
}

__device__ void LoadSquare(const float (&row)[kRowStride], int first, float* values) {
  const float4 square = *reinterpret_cast<const float4*>(&row[first]);
  values[0] = square.x, values[1] = square.y, values[2] = square.z, values[3] = square.w;
}

using Accumulators = float[2 * kSquare][2 * kSquare];

__device__ void MultiplyAccumulate(const Stage& stage, int m, int n, Accumulators& accumulators) {
#pragma unroll
  for (int k = 0; k < kTileK; ++k) {
    float a[2 * kSquare];
    float b[2 * kSquare];
    for (int half = 0; half < 2; ++half) {
      LoadSquare(stage.a[k], m + half * kTile / 2, a + half * kSquare);
      LoadSquare(stage.b[k], n + half * kTile / 2, b + half * kSquare);
    }
#pragma unroll
    for (int i = 0; i < 2 * kSquare; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * kSquare; ++j) {
        accumulators[i][j] = fmaf(a[i], b[j], accumulators[i][j]);
      }
    }
  }
}

// Calls function(elements, count, values) for each row of a square: its elements of the result, how
// many of them there are (perhaps 0 or less), and their accumulators.
template <typename Function>
__device__ void ForEachSquareRow(const MatmulParams& params, const Tile& tile, int m, int n,
                                 Accumulators& accumulators, const Function& function) {
#pragma unroll
  for (int i = 0; i < 2 * kSquare; ++i) {
    const int row = m + i / kSquare * (kTile / 2) + i % kSquare;
    if (row >= tile.num_m) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = n + half * kTile / 2;
      function(static_cast<float*>(params.out) + tile.out + int64_t{row} * params.shape_n + column,
               tile.num_n - column, accumulators[i] + half * kSquare);
    }
  }
}

template <MatmulKind kKind>
__device__ void StoreEpilogue(const MatmulParams& params, const Tile& tile, int m, int n,
                              Accumulators& accumulators) {
  // All loads come before the first store: the compiler would not move them across one.
  if (kIsRhsGradient<kKind> && params.accumulates) {
    ForEachSquareRow(params, tile, m, n, accumulators,
                     [&](const float* from, int count, float* values) {
                       if (params.out_is_aligned && count > 0) {
                         const float4 row = *reinterpret_cast<const float4*>(from);
                         values[0] += row.x, values[1] += row.y;
                         values[2] += row.z, values[3] += row.w;
                       } else {
#pragma unroll
                         for (int j = 0; j < kSquare; ++j) {
                           if (j < count) values[j] += from[j];
                         }
                       }
                     });
  }
  ForEachSquareRow(
      params, tile, m, n, accumulators, [&](float* to, int count, const float* values) {
        if (params.out_is_aligned && count > 0) {
          *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
        } else {
#pragma unroll
          for (int j = 0; j < kSquare; ++j) {
            if (j < count) to[j] = values[j];
          }
        }
      });
}

// If the activation is gated, a thread's first square along n is the gate and its second the up.
__device__ void ActivationEpilogue(const MatmulParams& params, const Tile& tile, int m, int n,
                                   const Accumulators& accumulators) {
  const bool is_gated = params.epilogue.activation.is_gated;
#pragma unroll
  for (int i = 0; i < 2 * kSquare; ++i) {
    const int row = m + i / kSquare * (kTile / 2) + i % kSquare;
    if (row >= tile.num_m) break;
#pragma unroll
    for (int j = 0; j < 2 * kSquare; ++j) {
      const int column = n + j / kSquare * (kTile / 2) + j % kSquare;
      if (column >= tile.num_n || (is_gated && j >= kSquare)) break;
      StoreActivation<Float32>(params, tile.group, tile.row + row, tile.column + column,
                               accumulators[i][j], accumulators[i][(j + kSquare) % (2 * kSquare)]);
    }
  }
}

}  // namespace

template <MatmulKind kKind>
__global__ void __launch_bounds__(kThreads, 1)
    GroupedMatmulFloat32Kernel(const __grid_constant__ MatmulParams params) {
  constexpr bool kAIsKMajor = !kIsRhsGradient<kKind>;  // stored as [m, k], not [k, m]
  constexpr bool kBIsKMajor = kHasTransposedB<kKind>;  // stored as [n, k], not [k, n]
  const int up_offset =
      kIsActivation<kKind> && params.epilogue.activation.is_gated ? params.shape_n : 0;
  Stage* const stages = reinterpret_cast<Stage*>(DynamicSharedMemory());
  const int m = threadIdx.x / kThreadsN * kSquare;
  const int n = threadIdx.x % kThreadsN * kSquare;
  const float* const a = static_cast<const float*>(params.a.data);
  const float* const b = static_cast<const float*>(params.b.data);

  StaticTileScheduler<kKind, kTile> tiles(params);
  for (Tile tile; tiles.Next(&tile);) {
    // K-blocks past the end are filled with zeros: the number of commits tells which have arrived.
    const auto fill = [&](int k_block) {
      Stage& stage = stages[k_block % kStages];
      const int64_t k = int64_t{k_block} * kTileK;
      const int num_k = tile.num_k - k_block * kTileK;
      Fill<kAIsKMajor>(stage.a, a + tile.a + k * (kAIsKMajor ? 1 : params.a.row_stride),
                       params.a.row_stride, tile.num_m, num_k);
      Fill<kBIsKMajor>(stage.b, b + tile.b + k * (kBIsKMajor ? 1 : params.b.row_stride),
                       params.b.row_stride, tile.num_n, num_k, up_offset);
      CpAsyncCommitGroup();
    };
    const int num_k_blocks = CeilDivide(tile.num_k, kTileK);
    if (num_k_blocks > 0) {
      for (int k_block = 0; k_block < kStages - 1; ++k_block) fill(k_block);
    }
    Accumulators accumulators = {};
    for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
      // After the barrier all threads' copies of this k-block have arrived, and all threads have
      // read the previous one, whose stage is refilled.
      CpAsyncWaitGroup<kStages - 2>();
      __syncthreads();
      fill(k_block + kStages - 1);
      MultiplyAccumulate(stages[k_block % kStages], m, n, accumulators);
    }
    // Waits until all threads have read the stages and the copies of zeros are complete, because
    // the next tile refills them.
    CpAsyncWaitGroup<0>();
    __syncthreads();
    if constexpr (kIsActivation<kKind>) {
      ActivationEpilogue(params, tile, m, n, accumulators);
    } else {
      StoreEpilogue<kKind>(params, tile, m, n, accumulators);
    }
  }
}

#define JAX_EP_INSTANTIATE(KIND)                                         \
  template __global__ void GroupedMatmulFloat32Kernel<MatmulKind::KIND>( \
      const __grid_constant__ MatmulParams);
JAX_EP_INSTANTIATE(kForward)
JAX_EP_INSTANTIATE(kForwardTransposed)
JAX_EP_INSTANTIATE(kRhsGradient)
JAX_EP_INSTANTIATE(kActivation)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::portable

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {
namespace portable {
namespace {

const void* KernelAddress(MatmulKind kind) {
  switch (kind) {
    case MatmulKind::kForward:
      return reinterpret_cast<const void*>(GroupedMatmulFloat32Kernel<MatmulKind::kForward>);
    case MatmulKind::kForwardTransposed:
      return reinterpret_cast<const void*>(
          GroupedMatmulFloat32Kernel<MatmulKind::kForwardTransposed>);
    case MatmulKind::kRhsGradient:
      return reinterpret_cast<const void*>(GroupedMatmulFloat32Kernel<MatmulKind::kRhsGradient>);
    case MatmulKind::kActivation:
      return reinterpret_cast<const void*>(GroupedMatmulFloat32Kernel<MatmulKind::kActivation>);
    case MatmulKind::kActivationGradient:
      break;  // kForwardTransposed, then ActivationGradientKernel
  }
  return nullptr;
}

}  // namespace
}  // namespace portable

MatmulKernel PortableFloat32MatmulKernel(MatmulKind kind) {
  return {.address = portable::KernelAddress(kind),
          .threads = portable::kThreads,
          .shared_bytes = portable::kSharedBytes,
          .tile_m = portable::kTile,
          .tile_n = portable::kTile,
          .store_elements = portable::kSquare};
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
