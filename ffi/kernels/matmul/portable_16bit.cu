// Grouped matmuls of 16-bit elements by the tensor core instructions that all GPUs since sm_80
// have.
#include "ffi/device/matmul/block_tiles.cuh"
#include "ffi/device/matmul/element_epilogue.cuh"
#include "ffi/device/matmul/operand_tile.cuh"
#include "ffi/device/ptx/cp_async.cuh"
#include "ffi/device/ptx/shared_memory.cuh"
#include "ffi/kernels/matmul/kernels.h"

namespace jax_ep {
namespace {

// A block computes a tile of 128 x 256 by 8 warps, 2 x 4 of 64 x 64 each. A warp's square is as
// large as registers allow: for every 16 of k it reads 4 KB of shared memory, and the fewer bytes a
// product the better, as that is what limits it. One block fits on a multiprocessor, so that the
// number of blocks is the number of multiprocessors in use.
constexpr int kThreads = 256;
constexpr int kTileM = 128;
constexpr int kTileN = 256;
constexpr int kTileK = 32;
constexpr int kStages = 4;

constexpr int kWarpM = 64;
constexpr int kWarpN = 64;
constexpr int kWarpsN = kTileN / kWarpN;
static_assert(kTileM / kWarpM * kWarpsN * 32 == kThreads);

constexpr int kFragment = 16;  // a fragment of an operand is 16 x 16
constexpr int kFragmentsM = kWarpM / kFragment;
constexpr int kFragmentsN = kWarpN / kFragment;
constexpr int kFragmentsK = kTileK / kFragment;
static_assert(kFragmentsK % 2 == 0, "the two register buffers take turns across steps");
static_assert(kStages >= 3, "a stage is filled while another is read and a third is on its way");

// The tiles of one step along k, for each way that the operands may be stored.
template <MatmulKind kKind>
struct Stage {
  static constexpr bool kLeftHasKInside = !kIsRhsGradient<kKind>;  // is [m, k], not [k, m]
  static constexpr bool kRightHasKInside = kIsTransposed<kKind>;
  using Left =
      OperandTile<kLeftHasKInside ? kTileM : kTileK, kLeftHasKInside ? kTileK : kTileM, kThreads>;
  using Right =
      OperandTile<kRightHasKInside ? kTileN : kTileK, kRightHasKInside ? kTileK : kTileN, kThreads>;
  static constexpr int kBytes = Left::kBytes + Right::kBytes;
  static constexpr int kAllBytes = kStages * kBytes;
  static_assert(kAllBytes <= 99 * 1024, "what sm_86, sm_89 and sm_120 have for a block");

  template <typename T, bool kCopied>
  __device__ static void Fill(uint32_t stage, const MatmulProblem& problem, const MatmulTile& tile,
                              int k) {
    const int left_k = tile.num_k - k;
    const int64_t left = tile.left + (kLeftHasKInside ? k : k * problem.left.pitch);
    const int64_t right = tile.right + (kRightHasKInside ? k : k * problem.right.pitch);
    constexpr bool kMayBeFloat32 = !kIsRhsGradient<kKind>;
    const bool is_gated = kIsActivation<kKind> && problem.epilogue.activation.is_gated;
    Left::template Fill<T, kCopied, false>(stage, problem.left, left,
                                           kLeftHasKInside ? tile.num_m : left_k,
                                           {kLeftHasKInside ? left_k : tile.num_m, 0});
    Right::template Fill<T, kCopied, kMayBeFloat32>(
        stage + Left::kBytes, problem.right, right, kRightHasKInside ? tile.num_n : left_k,
        {kRightHasKInside ? left_k : tile.num_n, is_gated ? problem.num_n : 0});
  }
};

// What a warp multiplies at once: its rows and columns for 16 of k.
struct Fragments {
  uint32_t left[kFragmentsM][4];
  uint32_t right[kFragmentsN][4];  // two operands of 8 columns each

  template <MatmulKind kKind>
  __device__ void Load(uint32_t stage, int m, int n, int k) {
    using Left = typename Stage<kKind>::Left;
    using Right = typename Stage<kKind>::Right;
    constexpr bool kLeftInside = Stage<kKind>::kLeftHasKInside;
    constexpr bool kRightInside = Stage<kKind>::kRightHasKInside;
    // An 8x8 matrix is wanted with pairs along k. Where k is not inside, it is read transposed. The
    // second matrix of left is the next along m, that of right the next along k.
#pragma unroll
    for (int i = 0; i < kFragmentsM; ++i) {
      const int at = m + i * kFragment;
      Left::template LoadFragment<!kLeftInside, kLeftInside>(
          stage, kLeftInside ? at : k, (kLeftInside ? k : at) / Left::kChunk, left[i]);
    }
#pragma unroll
    for (int i = 0; i < kFragmentsN; ++i) {
      const int at = n + i * kFragment;
      Right::template LoadFragment<!kRightInside, !kRightInside>(
          stage + Left::kBytes, kRightInside ? at : k, (kRightInside ? k : at) / Right::kChunk,
          right[i]);
    }
  }
};

using Sums = float[kFragmentsM][2 * kFragmentsN][4];

template <typename T>
__device__ void MultiplyAddAll(const Fragments& fragments, Sums& sums) {
#pragma unroll
  for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
    for (int j = 0; j < 2 * kFragmentsN; ++j) {
      Mma<T>(sums[i][j], fragments.left[i], &fragments.right[j / 2][j % 2 * 2]);
    }
  }
}

// The first `count` of two neighbours. Both begin at an even element of a tile.
template <typename T>
__device__ void StoreShared(const MatmulProblem& problem, int64_t at, int count,
                            const float* values) {
  if (count <= 0) return;
  if (problem.out_is_float32) {
    float* const to = static_cast<float*>(problem.out) + at;
    if (problem.out_is_aligned) {
      *reinterpret_cast<float2*>(to) = make_float2(values[0], values[1]);
    } else {
      to[0] = values[0];
      if (count > 1) to[1] = values[1];
    }
  } else {
    uint16_t* const to = static_cast<uint16_t*>(problem.out) + at;
    const uint32_t word = T::Pack(values);
    if (problem.out_is_aligned) {
      *reinterpret_cast<uint32_t*>(to) = word;
    } else {
      to[0] = static_cast<uint16_t>(word);
      if (count > 1) to[1] = static_cast<uint16_t>(word >> 16);
    }
  }
}

template <typename T>
__device__ void Store(const MatmulProblem& problem, const MatmulTile& tile, int warp_m, int warp_n,
                      const Sums& sums) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2 * kFragmentsM; ++i) {
    const int m = warp_m + 8 * i + lane / 4;
    if (m >= tile.num_m) break;
#pragma unroll
    for (int j = 0; j < 2 * kFragmentsN; ++j) {
      const int n = warp_n + 8 * j + lane % 4 * 2;
      StoreShared<T>(problem, tile.out + int64_t{m} * problem.num_n + n, tile.num_n - n,
                     &sums[i / 2][j][i % 2 * 2]);
    }
  }
}

// TileColumns puts the sums of gate and up into one lane.
template <typename T>
__device__ void StoreActivated(const MatmulProblem& problem, const MatmulTile& tile, int warp_m,
                               int warp_n, const Sums& sums) {
  const int lane = threadIdx.x % 32;
  const bool is_gated = problem.epilogue.activation.is_gated;
#pragma unroll
  for (int i = 0; i < 2 * kFragmentsM; ++i) {
    const int m = warp_m + 8 * i + lane / 4;
    if (m >= tile.num_m) break;
#pragma unroll
    for (int j = 0; j < 2 * kFragmentsN; ++j) {
      if (is_gated && j >= kFragmentsN) break;
      const float* const gate = &sums[i / 2][j][i % 2 * 2];
      const float* const up = &sums[i / 2][(j + kFragmentsN) % (2 * kFragmentsN)][i % 2 * 2];
      const int n = (is_gated ? warp_n / 2 : warp_n) + 8 * j + lane % 4 * 2;
      for (int column = 0; column < min(2, tile.num_n - n); ++column) {
        StoreActivated<T>(problem, tile.group, tile.row + m, tile.n + n + column, gate[column],
                          up[column]);
      }
    }
  }
}
static_assert(kWarpN == 64, "of TileColumns");

}  // namespace

template <typename T, MatmulKind kKind, bool kCopied>
__global__ void __launch_bounds__(kThreads, 1)
    Matmul16BitKernel(const __grid_constant__ MatmulProblem problem) {
  using Stage = Stage<kKind>;
  const uint32_t stages = SharedAddress(DynamicSharedMemory());
  const int warp = threadIdx.x / 32;
  const int warp_m = warp / kWarpsN * kWarpM;
  const int warp_n = warp % kWarpsN * kWarpN;

  MatmulTiles<kKind, kTileM> tiles(problem);
  for (MatmulTile tile; tiles.Next(&tile);) {
    const int num_steps = CeilDivide(tile.num_k, kTileK);
    // Zeros for steps past the end.
    const auto fill = [&](int step) {
      Stage::template Fill<T, kCopied>(stages + step % kStages * Stage::kBytes, problem, tile,
                                       step * kTileK);
      CpAsyncCommitGroup();
    };
    // Rows past the end of the group are only padding, and often whole warps have no others.
    const bool has_rows = warp_m < tile.num_m;

    Sums sums = {};
    Fragments fragments[2];
    if (num_steps > 0) {
      for (int step = 0; step < kStages - 1; ++step) fill(step);
      CpAsyncWaitGroup<kStages - 2>();
      __syncthreads();
      if (has_rows) fragments[0].Load<kKind>(stages, warp_m, warp_n, 0);
    }
    for (int step = 0; step < num_steps; ++step) {
      // The stage to fill is that of the step before, whose last fragments every warp read before
      // the barrier. Copies go between the multiplications. What takes registers comes before them.
      if (!kCopied) fill(step + kStages - 1);
      uint32_t stage = stages + step % kStages * Stage::kBytes;
#pragma unroll
      for (int i = 0; i < kFragmentsK; ++i) {
        if (i == kFragmentsK - 1) {
          // The next step's stage; after the barrier also what other threads copied into it.
          CpAsyncWaitGroup<kStages - 2>();
          __syncthreads();
          stage = stages + (step + 1) % kStages * Stage::kBytes;
        }
        const bool fills = kCopied && i == 0;
        if (has_rows) {
          fragments[(i + 1) % 2].Load<kKind>(stage, warp_m, warp_n,
                                             (i + 1) % kFragmentsK * kFragment);
          if (fills) fill(step + kStages - 1);
          MultiplyAddAll<T>(fragments[i % 2], sums);
        } else if (fills) {
          fill(step + kStages - 1);
        }
      }
    }
    // All are done with the stages, and so are the copies of zeros: the next tile fills them.
    CpAsyncWaitGroup<0>();
    __syncthreads();
    if constexpr (kIsActivation<kKind>) {
      StoreActivated<T>(problem, tile, warp_m, warp_n, sums);
    } else {
      Store<T>(problem, tile, warp_m, warp_n, sums);
    }
  }
}

#define JAX_EP_INSTANTIATE(TYPE, KIND)                                       \
  template __global__ void Matmul16BitKernel<TYPE, MatmulKind::KIND, false>( \
      const __grid_constant__ MatmulProblem);                                \
  template __global__ void Matmul16BitKernel<TYPE, MatmulKind::KIND, true>(  \
      const __grid_constant__ MatmulProblem);
JAX_EP_INSTANTIATE(BFloat16, kForward)
JAX_EP_INSTANTIATE(BFloat16, kForwardTransposed)
JAX_EP_INSTANTIATE(BFloat16, kRhsGradient)
JAX_EP_INSTANTIATE(BFloat16, kActivation)
JAX_EP_INSTANTIATE(Float16, kForward)
JAX_EP_INSTANTIATE(Float16, kForwardTransposed)
JAX_EP_INSTANTIATE(Float16, kRhsGradient)
JAX_EP_INSTANTIATE(Float16, kActivation)
#undef JAX_EP_INSTANTIATE

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {
namespace {

template <typename T, MatmulKind kKind>
MatmulKernel Describe(bool copied) {
  return {.address = copied ? reinterpret_cast<const void*>(Matmul16BitKernel<T, kKind, true>)
                            : reinterpret_cast<const void*>(Matmul16BitKernel<T, kKind, false>),
          .threads = kThreads,
          .shared_bytes = Stage<kKind>::kAllBytes,
          .tile_m = kTileM,
          .tile_n = kTileN,
          .stored_elements = 2};
}

template <typename T>
MatmulKernel Describe(MatmulKind kind, bool copied) {
  switch (kind) {
    case MatmulKind::kForward:
      return Describe<T, MatmulKind::kForward>(copied);
    case MatmulKind::kForwardTransposed:
      return Describe<T, MatmulKind::kForwardTransposed>(copied);
    case MatmulKind::kRhsGradient:
      return Describe<T, MatmulKind::kRhsGradient>(copied);
    case MatmulKind::kActivation:
      return Describe<T, MatmulKind::kActivation>(copied);
    case MatmulKind::kActivationGradient:
      break;  // in two kernels
  }
  return {};
}

}  // namespace

MatmulKernel SixteenBitMatmulKernel(bool is_bfloat16, MatmulKind kind, bool copied) {
  return is_bfloat16 ? Describe<BFloat16>(kind, copied) : Describe<Float16>(kind, copied);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
