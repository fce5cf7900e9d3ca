// What leads from the warps that copy to those that multiply, in the two blocks of a cluster
// (sm_90): rings of stages, which the copy engine fills, and of tiles, which say what the stages
// are of.
//
// The two blocks compute a pair of tiles at a time, in steps of the same number. Of the operand
// that these share each copies a half to both. A stage is full when the block's own warp that
// copies has said what to expect, and all of it has come, from both blocks. (Bytes may come before
// that is said: the phase waits for it.) It is empty when the warps that multiply have handed back
// their stages of this number in both blocks, since who fills the one fills the other, too.
//
// No stage is copied to while it is read. An arrival may count for a phase before its own, as a
// warp of the other block can be one use ahead. But it came there through its own full stage, asked
// for by a copying warp that had found this use's phase complete in its block: the first phase to
// be complete before all have read would need another one before it. For the same reason nobody is
// two phases ahead of who waits for a parity. The last pair, of nothing, reaches all warps of both
// blocks. Barriers of the cluster at the ends of the kernel keep each block there as long as the
// other may reach for its shared memory.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_PIPELINE_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_PIPELINE_CUH_

#include "ffi/device/matmul/sm90/tile_pairs.h"
#include "ffi/device/ptx/cluster.cuh"
#include "ffi/device/ptx/mbarrier.cuh"
#include "ffi/device/ptx/shared_memory.cuh"

namespace jax_ep::sm90 {

// Blocks of a cluster; the launch asks for as many.
inline constexpr int kClusterBlocks = 2;

// A block has one group of four warps for copies and tiles, and others that multiply.
inline constexpr int kWarpgroupThreads = 128;

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

// The value of lane 0, which the compiler then knows to be one for the warp.
__device__ inline int WarpUniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// A tile's part of the problem. No word is negative.
struct alignas(16) Tile {
  int32_t group;
  int32_t m;      // first row of the result; of the gradient, in its group's matrix
  int32_t n;      // first column of the result
  int32_t num_m;  // rows of the result from there on; may reach past the tile; none: only copies
  int32_t k;      // first of the contraction; past the operands' end where the result is zeros
  int32_t num_k;  // the same for both of a pair; 0: there are no more
  Shared shared;
  int32_t padding;

  // True of every tile. The compiler cannot know it, so whoever asks waits for all words.
  __device__ bool IsLoaded() const {
    return (group | m | n | num_m | k | num_k | static_cast<int32_t>(shared)) >= 0;
  }
};

// The shared memory of one block: stages, staging of results, barriers, and tiles.
template <int kStageBytes_, int kStages_, int kStagingBytes, int kConsumerWarps_>
class Pipeline {
 public:
  static constexpr int kStageBytes = kStageBytes_;
  static constexpr int kStages = kStages_;
  static constexpr int kConsumerWarps = kConsumerWarps_;
  static constexpr int kTileSlots = 2;
  static constexpr int kBarrierBytes = 8;                 // from one of a kind to the next
  static constexpr int kStaging = kStages * kStageBytes;  // where it begins

 private:
  static constexpr int kBarriers = kStaging + kStagingBytes;
  static constexpr int kNumBarriers = 2 * (kStages + kTileSlots) + 1;
  static constexpr int kTiles = kBarriers + (kNumBarriers + 1) / 2 * 16;
  static constexpr int kSlotBytes = sizeof(Tile);
  static_assert(kStageBytes % 1024 == 0 && kStagingBytes % 1024 == 0, "swizzle atoms are aligned");
  static_assert(kSlotBytes == 32, "two chunks");

 public:
  static constexpr int kSharedBytes = kTiles + kTileSlots * kSlotBytes;
  static_assert(kSharedBytes <= 227 * 1024);

  __device__ explicit Pipeline(uint32_t shared) : shared_(shared) {}

  __device__ uint32_t Stage(int stage) const { return shared_ + stage * kStageBytes; }
  __device__ uint32_t Staging() const { return shared_ + kStaging; }

  // That a stage has been filled, and that nobody in the cluster reads it any more.
  __device__ uint32_t Full(int stage) const { return Barrier(stage); }
  __device__ uint32_t Empty(int stage) const { return Barrier(kStages + stage); }

  // That the block's tile of the next pair is there. Block 0's: that both have read theirs.
  __device__ uint32_t TileFull(int slot) const { return Barrier(2 * kStages + slot); }
  __device__ uint32_t TileEmpty(int slot) const { return Barrier(2 * kStages + kTileSlots + slot); }

  // Block 0's: that the next pair is to be found.
  __device__ uint32_t TileWanted() const { return Barrier(kNumBarriers - 1); }

  // By one thread. A barrier of the cluster has to follow.
  __device__ void Initialize() const {
    for (int stage = 0; stage < kStages; ++stage) {
      MbarrierInit(Full(stage), 1);
      MbarrierInit(Empty(stage), kClusterBlocks * kConsumerWarps);
    }
    for (int slot = 0; slot < kTileSlots; ++slot) {
      MbarrierInit(TileFull(slot), 1);
      MbarrierInit(TileEmpty(slot), kClusterBlocks * (kConsumerWarps + 1));
    }
    MbarrierInit(TileWanted(), 1);
    FenceMbarrierInit();
  }

  // Leaves a tile in a slot of a block of the cluster.
  __device__ void SendTile(int slot, const Tile& tile, int rank) const {
    const uint32_t to = MapToBlock(TileSlot(slot), rank);
    const uint32_t full = MapToBlock(TileFull(slot), rank);
    MbarrierArriveExpectTxRemote(full, kSlotBytes);
    StoreAsyncRemote(to, {tile.group, tile.m, tile.n, tile.num_m}, full);
    StoreAsyncRemote(to + 16, {tile.k, tile.num_k, static_cast<int32_t>(tile.shared), 0}, full);
  }

  __device__ Tile ReadTile(int slot) const {
    const uint4 first = LoadShared(TileSlot(slot));
    const uint4 second = LoadShared(TileSlot(slot) + 16);
    const auto word = [](uint32_t value) { return static_cast<int32_t>(value); };
    return {word(first.x),
            word(first.y),
            word(first.z),
            word(first.w),
            word(second.x),
            word(second.y),
            static_cast<Shared>(second.z)};
  }

 private:
  __device__ uint32_t Barrier(int number) const {
    return shared_ + kBarriers + number * kBarrierBytes;
  }
  __device__ uint32_t TileSlot(int slot) const { return shared_ + kTiles + slot * kSlotBytes; }

  uint32_t shared_;
};

// The ring of tiles as a warp reads it.
template <typename Pipeline>
class TileReader {
 public:
  __device__ explicit TileReader(const Pipeline& pipeline) : pipeline_(pipeline) {}

  // By whole warps.
  __device__ Tile Next() {
    MbarrierWait(pipeline_.TileFull(slot_.index), slot_.parity);
    Tile tile = {};
    bool has_read = false;
    if (threadIdx.x % 32 == 0) {
      tile = pipeline_.ReadTile(slot_.index);
      has_read = tile.IsLoaded();
    }
    tile = {WarpUniform(tile.group),
            WarpUniform(tile.m),
            WarpUniform(tile.n),
            WarpUniform(tile.num_m),
            WarpUniform(tile.k),
            WarpUniform(tile.num_k),
            static_cast<Shared>(WarpUniform(static_cast<int32_t>(tile.shared)))};
    // An arrival does not wait for loads before it, and the other block may hear of it before they
    // have read. Without a condition that needs their words, one in about 10^9 of them got what the
    // slot was given next.
    if (has_read) MbarrierArriveRemote(MapToBlock(pipeline_.TileEmpty(slot_.index), 0));
    slot_.Advance();
    return tile;
  }

 private:
  const Pipeline pipeline_;
  Position<Pipeline::kTileSlots> slot_;
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_PIPELINE_CUH_
