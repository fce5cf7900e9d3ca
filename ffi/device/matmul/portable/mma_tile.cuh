// The tiles of 16-bit operands that mma.sync multiplies: a block's k-block in shared memory, and a
// warp's fragments and accumulators in registers.
#ifndef JAX_EP_DEVICE_MATMUL_PORTABLE_MMA_TILE_CUH_
#define JAX_EP_DEVICE_MATMUL_PORTABLE_MMA_TILE_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/portable/operand_tile.cuh"
#include "ffi/device/matmul/portable/tile_scheduler.cuh"
#include "ffi/device/ptx/mma.cuh"

namespace jax_ep::portable {

inline constexpr int kThreads = 256;
inline constexpr int kTileM = 128;
inline constexpr int kTileN = 256;
inline constexpr int kTileK = 32;
inline constexpr int kStages = 4;
static_assert(kStages >= 3, "one stage is filled, one is read, and one is in flight");

inline constexpr int kWarpM = 64;
inline constexpr int kWarpN = 64;
inline constexpr int kWarpsN = kTileN / kWarpN;
static_assert(kTileM / kWarpM * kWarpsN * 32 == kThreads, "the warps' tiles cover the block's");
static_assert(kWarpN == 64, "TileColumns alternates within 64 columns, all of one warp");

inline constexpr int kFragment = 16;  // a fragment of an operand is 16 x 16
inline constexpr int kFragmentsM = kWarpM / kFragment;
inline constexpr int kFragmentsN = kWarpN / kFragment;
inline constexpr int kFragmentsK = kTileK / kFragment;
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

}  // namespace jax_ep::portable

#endif  // JAX_EP_DEVICE_MATMUL_PORTABLE_MMA_TILE_CUH_
