// Grouped matmul of 16-bit operands with mma.sync, for sm_80 and newer.
//
// A persistent kernel: each block computes every gridDim.x-th tile of 128 x 256 with 8 warps, 2 x 4
// of 64 x 64 each. Per tile:
//
//   1. All threads fill a ring of kStages stages in shared memory with cp.async or, for unaligned
//      or float32 operands, through registers. A stage holds one k-block of a and b.
//   2. Each warp loads fragments with ldmatrix, ahead of the mma.sync instructions that use them.
//   3. The epilogue stores the accumulators from registers to global memory.
//
// A warp's tile is as large as registers allow. Each 16 of k take 4 KB of shared memory reads,
// which limit the kernel, so fewer bytes per multiply-add are better. One block fits on an SM; the
// number of blocks is then the number of SMs in use.
#include "ffi/device/matmul/portable/epilogue.cuh"
#include "ffi/device/matmul/portable/operand_tile.cuh"
#include "ffi/device/matmul/portable/tile_scheduler.cuh"
#include "ffi/device/ptx/cp_async.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/kernels/matmul/kernels.h"

namespace jax_ep::portable {
namespace {

constexpr int kThreads = 256;
constexpr int kTileM = 128;
constexpr int kTileN = 256;
constexpr int kTileK = 32;
constexpr int kStages = 4;
static_assert(kStages >= 3, "one stage is filled, one is read, and one is in flight");

constexpr int kWarpM = 64;
constexpr int kWarpN = 64;
constexpr int kWarpsN = kTileN / kWarpN;
static_assert(kTileM / kWarpM * kWarpsN * 32 == kThreads, "the warps' tiles cover the block's");
static_assert(kWarpN == 64, "TileColumns alternates within 64 columns, all of one warp");

constexpr int kFragment = 16;  // a fragment of an operand is 16 x 16
constexpr int kFragmentsM = kWarpM / kFragment;
constexpr int kFragmentsN = kWarpN / kFragment;
constexpr int kFragmentsK = kTileK / kFragment;
static_assert(kFragmentsK % 2 == 0, "the two fragment buffers alternate across k-blocks");

// One k-block of both operands, in the layout in which each is stored.
template <MatmulKind kKind>
struct Stage {
  static constexpr bool kAIsKMajor = !kIsRhsGradient<kKind>;  // stored as [m, k], not [k, m]
  static constexpr bool kBIsKMajor = kHasTransposedB<kKind>;  // stored as [n, k], not [k, n]
  using A = OperandTile<kAIsKMajor ? kTileM : kTileK, kAIsKMajor ? kTileK : kTileM, kThreads>;
  using B = OperandTile<kBIsKMajor ? kTileN : kTileK, kBIsKMajor ? kTileK : kTileN, kThreads>;
  static constexpr int kBytes = A::kBytes + B::kBytes;
  static constexpr int kSharedBytes = kStages * kBytes;
  static_assert(kSharedBytes <= 99 * 1024, "the limit per block of sm_86, sm_89 and sm_120");

  // `k` is where the k-block begins. Elements past the tile's num_k become zeros.
  template <typename T, bool kUseCpAsync>
  __device__ static void Fill(uint32_t stage, const MatmulParams& params, const Tile& tile, int k) {
    const int num_k = tile.num_k - k;
    const int64_t a = tile.a + (kAIsKMajor ? k : k * params.a.row_stride);
    const int64_t b = tile.b + (kBIsKMajor ? k : k * params.b.row_stride);
    constexpr bool kMayBeFloat32 = !kIsRhsGradient<kKind>;
    const bool is_gated = kIsActivation<kKind> && params.epilogue.activation.is_gated;
    A::template Fill<T, kUseCpAsync, false>(stage, params.a, a, kAIsKMajor ? tile.num_m : num_k,
                                            {kAIsKMajor ? num_k : tile.num_m, 0});
    B::template Fill<T, kUseCpAsync, kMayBeFloat32>(
        stage + A::kBytes, params.b, b, kBIsKMajor ? tile.num_n : num_k,
        {kBIsKMajor ? num_k : tile.num_n, is_gated ? params.shape_n : 0});
  }
};

// The operands of a warp's tile for 16 of k.
struct Fragments {
  uint32_t a[kFragmentsM][4];
  uint32_t b[kFragmentsN][4];  // two operands of mma.sync, 8 columns each

  // mma.sync takes pairs along k, so ldmatrix transposes an operand that is not K-major. The second
  // 8 x 8 matrix of a is the next along m, but that of b the next along k.
  template <MatmulKind kKind>
  __device__ void Load(uint32_t stage, int m, int n, int k) {
    using A = typename Stage<kKind>::A;
    using B = typename Stage<kKind>::B;
    constexpr bool kAIsKMajor = Stage<kKind>::kAIsKMajor;
    constexpr bool kBIsKMajor = Stage<kKind>::kBIsKMajor;
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
      const int mi = m + i * kFragment;
      A::template LoadFragment<!kAIsKMajor, kAIsKMajor>(
          stage, kAIsKMajor ? mi : k, (kAIsKMajor ? k : mi) / A::kVectorElements, a[i]);
    }
#pragma unroll
    for (int i = 0; i < kFragmentsN; ++i) {
      const int ni = n + i * kFragment;
      B::template LoadFragment<!kBIsKMajor, !kBIsKMajor>(
          stage + A::kBytes, kBIsKMajor ? ni : k, (kBIsKMajor ? k : ni) / B::kVectorElements, b[i]);
    }
  }
};

using Accumulators = float[kFragmentsM][2 * kFragmentsN][4];

template <typename T>
__device__ void MultiplyAccumulate(const Fragments& fragments, Accumulators& accumulators) {
#pragma unroll
  for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * kFragmentsN; ++j) {
      Mma<T>(accumulators[i][j], fragments.a[i], &fragments.b[j / 2][j % 2 * 2]);
    }
  }
}

// Calls function(index, count, values) for each pair of adjacent elements of this thread: the index
// of the first in `out`, how many of them lie in the result (perhaps 0 or less), their
// accumulators.
template <typename Function>
__device__ void ForEachPair(const MatmulParams& params, const Tile& tile, int warp_m, int warp_n,
                            Accumulators& accumulators, const Function& function) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * kFragmentsM; ++i) {
    const int m = warp_m + 8 * i + lane / 4;
    if (m >= tile.num_m) break;
#pragma unroll
    for (int j = 0; j < 2 * kFragmentsN; ++j) {
      const int n = warp_n + 8 * j + lane % 4 * 2;
      function(tile.out + int64_t{m} * params.shape_n + n, tile.num_n - n,
               &accumulators[i / 2][j][i % 2 * 2]);
    }
  }
}

// Adds the first `count` of two adjacent elements of the result to `values`.
__device__ void AddPair(const MatmulParams& params, int64_t index, int count, float* values) {
  if (count <= 0) return;
  const float* const from = static_cast<const float*>(params.out) + index;
  if (params.out_is_aligned) {
    const float2 pair = *reinterpret_cast<const float2*>(from);
    values[0] += pair.x, values[1] += pair.y;
  } else {
    values[0] += from[0];
    if (count > 1) values[1] += from[1];
  }
}

// Stores the first `count` of two adjacent elements; the first has an even column in its tile.
template <typename T>
__device__ void StorePair(const MatmulParams& params, int64_t index, int count,
                          const float* values) {
  if (count <= 0) return;
  if (params.out_is_float32) {
    float* const to = static_cast<float*>(params.out) + index;
    if (params.out_is_aligned) {
      *reinterpret_cast<float2*>(to) = make_float2(values[0], values[1]);
    } else {
      to[0] = values[0];
      if (count > 1) to[1] = values[1];
    }
  } else {
    uint16_t* const to = static_cast<uint16_t*>(params.out) + index;
    const uint32_t word = T::Pack(values);
    if (params.out_is_aligned) {
      *reinterpret_cast<uint32_t*>(to) = word;
    } else {
      to[0] = static_cast<uint16_t>(word);
      if (count > 1) to[1] = static_cast<uint16_t>(word >> 16);
    }
  }
}

template <typename T, MatmulKind kKind>
__device__ void StoreEpilogue(const MatmulParams& params, const Tile& tile, int warp_m, int warp_n,
                              Accumulators& accumulators) {
  // All loads come before the first store: the compiler would not move them across one.
  if (kIsRhsGradient<kKind> && params.accumulates) {
    ForEachPair(
        params, tile, warp_m, warp_n, accumulators,
        [&](int64_t index, int count, float* values) { AddPair(params, index, count, values); });
  }
  ForEachPair(params, tile, warp_m, warp_n, accumulators,
              [&](int64_t index, int count, const float* values) {
                StorePair<T>(params, index, count, values);
              });
}

// The interleaving of TileColumns gives a lane the accumulators of both gate and up.
template <typename T>
__device__ void ActivationEpilogue(const MatmulParams& params, const Tile& tile, int warp_m,
                                   int warp_n, const Accumulators& accumulators) {
  const int lane = threadIdx.x % 32;
  const bool is_gated = params.epilogue.activation.is_gated;
#pragma unroll
  for (int i = 0; i < 2 * kFragmentsM; ++i) {
    const int m = warp_m + 8 * i + lane / 4;
    if (m >= tile.num_m) break;
#pragma unroll
    for (int j = 0; j < 2 * kFragmentsN; ++j) {
      if (is_gated && j >= kFragmentsN) break;
      const float* const gate = &accumulators[i / 2][j][i % 2 * 2];
      const float* const up =
          &accumulators[i / 2][(j + kFragmentsN) % (2 * kFragmentsN)][i % 2 * 2];
      const int n = (is_gated ? warp_n / 2 : warp_n) + 8 * j + lane % 4 * 2;
      for (int x = 0; x < min(2, tile.num_n - n); ++x) {
        StoreActivation<T>(params, tile.group, tile.row + m, tile.column + n + x, gate[x], up[x]);
      }
    }
  }
}

}  // namespace

template <typename T, MatmulKind kKind, bool kUseCpAsync>
__global__ void __launch_bounds__(kThreads, 1)
    GroupedMatmul16BitKernel(const __grid_constant__ MatmulParams params) {
  using Stage = Stage<kKind>;
  const uint32_t stages = SharedAddress(DynamicSharedMemory());
  const int warp = threadIdx.x / 32;
  const int warp_m = warp / kWarpsN * kWarpM;
  const int warp_n = warp % kWarpsN * kWarpN;

  StaticTileScheduler<kKind, kTileM> tiles(params);
  for (Tile tile; tiles.Next(&tile);) {
    const int num_k_blocks = CeilDivide(tile.num_k, kTileK);
    // K-blocks past the end are filled with zeros: the number of commits tells which have arrived.
    const auto fill = [&](int k_block) {
      Stage::template Fill<T, kUseCpAsync>(stages + k_block % kStages * Stage::kBytes, params, tile,
                                           k_block * kTileK);
      CpAsyncCommitGroup();
    };
    // Rows past the end of the group are padding; often a warp has no others.
    const bool has_rows = warp_m < tile.num_m;

    Accumulators accumulators = {};
    Fragments fragments[2];
    if (num_k_blocks > 0) {
      for (int k_block = 0; k_block < kStages - 1; ++k_block) fill(k_block);
      CpAsyncWaitGroup<kStages - 2>();
      __syncthreads();
      if (has_rows) fragments[0].Load<kKind>(stages, warp_m, warp_n, 0);
    }
    for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
      // Refills the previous k-block's stage, whose last fragments every warp loaded before the
      // barrier below. Copies by cp.async are issued between the multiplications; those through
      // registers before, because they need the registers.
      if (!kUseCpAsync) fill(k_block + kStages - 1);
      uint32_t stage = stages + k_block % kStages * Stage::kBytes;
#pragma unroll
      for (int i = 0; i < kFragmentsK; ++i) {
        if (i == kFragmentsK - 1) {
          // Waits for the next k-block; the barrier covers what other threads copied.
          CpAsyncWaitGroup<kStages - 2>();
          __syncthreads();
          stage = stages + (k_block + 1) % kStages * Stage::kBytes;
        }
        const bool fills = kUseCpAsync && i == 0;
        if (has_rows) {
          fragments[(i + 1) % 2].Load<kKind>(stage, warp_m, warp_n,
                                             (i + 1) % kFragmentsK * kFragment);
          if (fills) fill(k_block + kStages - 1);
          MultiplyAccumulate<T>(fragments[i % 2], accumulators);
        } else if (fills) {
          fill(k_block + kStages - 1);
        }
      }
    }
    // Waits until all warps have read the stages and the copies of zeros are complete, because the
    // next tile refills them.
    CpAsyncWaitGroup<0>();
    __syncthreads();
    if constexpr (kIsActivation<kKind>) {
      ActivationEpilogue<T>(params, tile, warp_m, warp_n, accumulators);
    } else {
      StoreEpilogue<T, kKind>(params, tile, warp_m, warp_n, accumulators);
    }
  }
}

#define JAX_EP_INSTANTIATE(TYPE, KIND)                                              \
  template __global__ void GroupedMatmul16BitKernel<TYPE, MatmulKind::KIND, false>( \
      const __grid_constant__ MatmulParams);                                        \
  template __global__ void GroupedMatmul16BitKernel<TYPE, MatmulKind::KIND, true>(  \
      const __grid_constant__ MatmulParams);
JAX_EP_INSTANTIATE(BFloat16, kForward)
JAX_EP_INSTANTIATE(BFloat16, kForwardTransposed)
JAX_EP_INSTANTIATE(BFloat16, kRhsGradient)
JAX_EP_INSTANTIATE(BFloat16, kActivation)
JAX_EP_INSTANTIATE(Float16, kForward)
JAX_EP_INSTANTIATE(Float16, kForwardTransposed)
JAX_EP_INSTANTIATE(Float16, kRhsGradient)
JAX_EP_INSTANTIATE(Float16, kActivation)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep::portable

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {
namespace portable {
namespace {

template <typename T, MatmulKind kKind>
MatmulKernel Describe(bool use_cp_async) {
  const auto kernel = use_cp_async ? GroupedMatmul16BitKernel<T, kKind, true>
                                   : GroupedMatmul16BitKernel<T, kKind, false>;
  return {.address = reinterpret_cast<const void*>(kernel),
          .threads = kThreads,
          .shared_bytes = Stage<kKind>::kSharedBytes,
          .tile_m = kTileM,
          .tile_n = kTileN,
          .store_elements = 2};
}

template <typename T>
MatmulKernel Describe(MatmulKind kind, bool use_cp_async) {
  switch (kind) {
    case MatmulKind::kForward:
      return Describe<T, MatmulKind::kForward>(use_cp_async);
    case MatmulKind::kForwardTransposed:
      return Describe<T, MatmulKind::kForwardTransposed>(use_cp_async);
    case MatmulKind::kRhsGradient:
      return Describe<T, MatmulKind::kRhsGradient>(use_cp_async);
    case MatmulKind::kActivation:
      return Describe<T, MatmulKind::kActivation>(use_cp_async);
    case MatmulKind::kActivationGradient:
      break;  // kForwardTransposed, then ActivationGradientKernel
  }
  return {};
}

}  // namespace
}  // namespace portable

MatmulKernel Portable16BitMatmulKernel(bool is_bfloat16, MatmulKind kind, bool use_cp_async) {
  return is_bfloat16 ? portable::Describe<BFloat16>(kind, use_cp_async)
                     : portable::Describe<Float16>(kind, use_cp_async);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
