// The grouped matmul of sm_90a: its tiles, what is where in a block's shared memory, and the two
// rings that lead from the warp that copies to those that multiply.
#ifndef JAX_EP_DEVICE_SM90_PIPELINE_CUH_
#define JAX_EP_DEVICE_SM90_PIPELINE_CUH_

#include "ffi/device/async_copy.cuh"
#include "ffi/device/group_tiles.cuh"
#include "ffi/device/matmul_problem.h"
#include "ffi/device/result_rows.cuh"

namespace jax_ep::sm90 {

// A block computes a tile of 128 x 256, each of two groups of four warps 64 x 256 of it.
inline constexpr int kTileM = 128;
inline constexpr int kTileN = 256;
static_assert(kTileN == kResultN);
inline constexpr int kTileK = 64;
inline constexpr int kStages = 4;
inline constexpr int kGroupThreads = 128;
inline constexpr int kConsumers = 2;
inline constexpr int kThreads = (1 + kConsumers) * kGroupThreads;
inline constexpr int kConsumerWarps = kConsumers * kGroupThreads / 32;
inline constexpr int kGroupM = kTileM / kConsumers;
static_assert(kGroupM == 64, "rows of one instruction");

// A block has what its threads are launched with, in multiples of 8; those that copy leave most of
// theirs to those that multiply. Whoever asks for more waits for ever.
inline constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
inline constexpr int kProducerRegisters = 56;
inline constexpr int kConsumerRegisters = 224;
static_assert((kProducerRegisters + kConsumers * kConsumerRegisters) * kGroupThreads <=
              kThreads * kLaunchRegisters);

// Named barriers of those that multiply.
inline constexpr int kCleared = 1;

inline constexpr int kLine = 64;  // elements of a line of 128 bytes
inline constexpr int kLeftBytes = kTileM * kTileK * 2;
inline constexpr int kLeftHalfBytes = kLeftBytes / kConsumers;  // a consumer's
inline constexpr int kRightBytes = kTileN * kTileK * 2;
inline constexpr int kStageBytes = kLeftBytes + kRightBytes;
inline constexpr int kBlockBytes = kTileK * kLine * 2;  // 64 x 64 elements
inline constexpr int kStaging = kStages * kStageBytes;  // of results
inline constexpr int kBarriers = kStaging + kConsumerWarps * kStagedBytes;
inline constexpr int kTileSlots = 2;
inline constexpr int kNumBarriers = 2 * (kStages + kTileSlots) + 1;
inline constexpr int kTiles = kBarriers + (kNumBarriers + 1) / 2 * 16;
inline constexpr int kSharedBytes = kTiles + kTileSlots * 32;
static_assert(kSharedBytes <= 227 * 1024);
static_assert(kBlockBytes % 1024 == 0 && kLeftBytes % 1024 == 0, "swizzle atoms are aligned");

// Where one is in a ring of `kCount`; both sides go round it in the same order.
template <int kCount>
struct Position {
  int index = 0;
  uint32_t parity = 0;

  __device__ void Advance() {
    if (++index < kCount) return;
    index = 0;
    parity ^= 1;
  }
};

// Of the ring of stages, and of the ring of tiles.
__device__ inline uint32_t Full(uint32_t shared, int stage) {
  return shared + kBarriers + stage * 8;
}
__device__ inline uint32_t Empty(uint32_t shared, int stage) {
  return Full(shared, kStages + stage);
}
__device__ inline uint32_t TileFull(uint32_t shared, int slot) {
  return Full(shared, 2 * kStages + slot);
}
__device__ inline uint32_t TileEmpty(uint32_t shared, int slot) {
  return Full(shared, 2 * kStages + kTileSlots + slot);
}

// That the next tile is to be found.
__device__ inline uint32_t TileWanted(uint32_t shared) {
  return Full(shared, 2 * (kStages + kTileSlots));
}

// A tile's part of the problem.
struct Tile {
  int32_t group;
  int32_t m;      // first row of the result; of the gradient, in its group's matrix
  int32_t n;      // first column of the result
  int32_t num_m;  // rows of the result from there on; may reach past the tile
  int32_t k;      // first of the contraction; past the operands' end where the result is zeros
  int32_t num_k;  // 0: there are no more tiles
};
static_assert(sizeof(Tile) <= 32);

__device__ inline Tile* TileSlot(int slot) {
  return reinterpret_cast<Tile*>(DynamicSharedMemory() + kTiles + slot * 32);
}

// The value of lane 0, which the compiler then knows to be one for the warp.
__device__ inline int Uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// By whole warps. Lane 0 has read the slot, and may say so.
__device__ inline Tile ReadTile(int slot) {
  Tile tile = {};
  if (threadIdx.x % 32 == 0) tile = *TileSlot(slot);
  return {Uniform(tile.group), Uniform(tile.m), Uniform(tile.n),
          Uniform(tile.num_m), Uniform(tile.k), Uniform(tile.num_k)};
}

template <MatmulKind kKind>
class Tiles {
 public:
  __device__ explicit Tiles(const MatmulProblem& problem)
      : problem_(problem),
        groups_(problem.rows, (problem.num_m + kTileM - 1) / kTileM,
                (problem.num_n + problem.tile_n - 1) / problem.tile_n) {}

  // By whole warps, with growing indices.
  __device__ Tile Find(int64_t index) {
    GroupTile at;
    if (!groups_.Find(index, &at)) return {};
    Tile tile = {.group = at.group, .m = at.m * kTileM, .n = at.n * problem_.tile_n};
    bool is_zero = false;
    if constexpr (kIsGradient<kKind>) {
      tile.num_m = problem_.num_m - tile.m;
      tile.k = at.first_row;
      tile.num_k = at.end_row - at.first_row;
      is_zero = tile.num_k == 0;
    } else {
      tile.m += at.first_row;
      tile.num_m = at.end_row - tile.m;
      tile.num_k = problem_.num_k;
      is_zero = at.group == problem_.rows.num_groups;
    }
    // One step of what the copies put where there are no operands.
    if (is_zero) {
      tile.group = min(tile.group, problem_.rows.num_groups - 1);
      tile.k = kIsGradient<kKind> ? problem_.rows.num_rows : problem_.num_k;
      tile.num_k = kTileK;
    }
    return tile;
  }

 private:
  const MatmulProblem& problem_;
  GroupTiles<kIsGradient<kKind> ? 0 : kTileM> groups_;
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_SM90_PIPELINE_CUH_
