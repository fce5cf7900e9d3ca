// Shared memory of the sm_90 matmul, and the barriers between the warps of a cluster.
//
// Each block has two rings in its shared memory. TMA fills the ring of operand stages. The
// scheduler warp fills the ring of tile slots, which tells the other warps what the stages belong
// to.
//
// The two blocks of a cluster compute a pair of tiles at a time, with the same number of k-blocks.
// Each block loads half of the operand that the tiles share and multicasts it to both blocks.
//
//   full barrier    completes when the block's own producer has announced the stage's bytes, and
//                   all of them have arrived, from both blocks. Bytes may arrive before they are
//                   announced: the phase still waits for the announcement.
//   empty barrier   completes when the consumers of both blocks have released their stage of this
//                   index, because a producer's multicast writes to both blocks.
//
// No stage is overwritten while it is read. A consumer of the other block can be one use of the
// stage ahead, so its release may count for an earlier phase than its own. But it first waited for
// its own full barrier. Its producer had then found the empty barrier's phase for this use
// complete. So the first phase to complete before all consumers have read would need another such
// phase before it. For the same reason no warp is two phases ahead of a warp that waits for a
// parity.
//
// The last pair is an empty one, which all warps of both blocks receive. A block's shared memory
// has to be there while the other block may access it. At the beginning the cluster barrier sees to
// that. At the end the producer waits until all stages are released, and the scheduler until all
// tile slots are; all other accesses of the other block complete a barrier that consumers wait for.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_PIPELINE_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_PIPELINE_CUH_

#include "ffi/device/matmul/sm90/schedule/swapped_tile_pairs.h"
#include "ffi/device/matmul/sm90/schedule/tile_pairs.h"
#include "ffi/device/matmul/sm90/shapes.h"
#include "ffi/device/profile/recorder.cuh"
#include "ffi/device/ptx/cluster.cuh"
#include "ffi/device/ptx/mbarrier.cuh"
#include "ffi/device/ptx/shared_memory.cuh"

namespace jax_ep::sm90 {

// Returns lane 0's value; the compiler then knows that it is uniform across the warp.
__device__ inline int WarpUniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// A position in a ring. Producers and consumers advance through it in the same order.
template <int kCount>
struct PipelineState {
  int index = 0;
  uint32_t parity = 0;

  __device__ void Advance() {
    if (++index < kCount) return;
    index = 0;
    parity ^= 1;
  }
};

// One block's tile of a pair. No member is negative.
struct alignas(16) Tile {
  int32_t group;
  int32_t m;      // first row of the result; for kRhsGradient, within the group's matrix
  int32_t n;      // first column of the result
  int32_t num_m;  // valid rows from m on; may exceed the tile; 0: the block only loads
  int32_t k;      // where k begins; past the end of the operands if the result is zeros
  int32_t num_k;  // the same for both tiles of a pair; 0: there are no more pairs
  SharedOperand shared;
  int32_t padding;

  // Always true. The compiler cannot know that, so the caller waits for all words of the tile.
  __device__ bool IsLoaded() const {
    return (group | m | n | num_m | k | num_k | static_cast<int32_t>(shared)) >= 0;
  }
};

inline constexpr int kTileBytes = sizeof(Tile);
static_assert(kTileBytes == 32, "a tile is sent as two vectors of 16 bytes");

inline constexpr int kTileSlots = 2;
inline constexpr int kRowWeightsBuffers = 2;
inline constexpr int kRowWeightsBytes = SwappedTilePairs::kMaxRows * 4;
inline constexpr int kNumBarriers = 2 * (kStages + kTileSlots) + 4;
inline constexpr int kBarrierBytes = 8;

// The shared memory of a block: byte offsets.
struct SharedLayout {
  static constexpr int kStaging = kStages * kStageBytes;
  static constexpr int kBarriers = kStaging + kConsumerWarps * kWarpStagingBytes;
  static constexpr int kTiles = kBarriers + CeilDivide(kNumBarriers * kBarrierBytes, 16) * 16;
  static constexpr int kRowWeights = kTiles + kTileSlots * kTileBytes;
  // Static shared memory would move all that is aligned.
  static constexpr int kRecorders = kRowWeights + kRowWeightsBuffers * kRowWeightsBytes;
  static constexpr int kBytes = kRecorders + kThreads / 32 * kRecorderBytes;
  static_assert(kStaging % 1024 == 0 && kWarpStagingBytes % 1024 == 0,
                "swizzle atoms begin at multiples of 1024 bytes");
  static_assert(kBytes <= 227 * 1024, "the limit per block of sm_90");
};

// Addresses and barriers of a block's shared memory.
class Pipeline {
 public:
  __device__ explicit Pipeline(uint32_t shared) : shared_(shared) {}

  __device__ uint32_t Stage(int stage) const { return shared_ + stage * kStageBytes; }
  __device__ uint32_t Staging(int consumer_warp) const {
    return shared_ + SharedLayout::kStaging + consumer_warp * kWarpStagingBytes;
  }

  __device__ uint32_t FullBarrier(int stage) const { return Barrier(stage); }
  __device__ uint32_t EmptyBarrier(int stage) const { return Barrier(kStages + stage); }

  // Completes when the scheduler warp has written this block's tile.
  __device__ uint32_t TileFullBarrier(int slot) const { return Barrier(2 * kStages + slot); }

  // Used in block 0 only: completes when all warps of both blocks have read their tile.
  __device__ uint32_t TileEmptyBarrier(int slot) const {
    return Barrier(2 * kStages + kTileSlots + slot);
  }

  // Used in block 0 only: completes when its producer asks for the next pair.
  __device__ uint32_t TileRequestBarrier() const { return Barrier(2 * (kStages + kTileSlots)); }

  // Complete when all consumer warps have staged their results, and when they have been stored.
  __device__ uint32_t StagedBarrier() const { return Barrier(2 * (kStages + kTileSlots) + 1); }
  __device__ uint32_t StoredBarrier() const { return Barrier(2 * (kStages + kTileSlots) + 2); }

  // Row weights of a tile and of the next, and the barrier that completes when all consumer threads
  // have copied theirs: see SwappedRowWeights.
  __device__ uint32_t RowWeightsBuffer(int buffer) const {
    return shared_ + SharedLayout::kRowWeights + buffer * kRowWeightsBytes;
  }
  __device__ uint32_t RowWeightsBarrier() const { return Barrier(2 * (kStages + kTileSlots) + 3); }

  // `has_storer`: whether one more warp reads the tiles, and stores to the stages of its block.
  // Then each of its threads fills a stage, and each consumer thread of the block releases it:
  // racecheck does not know that __syncwarp orders what other threads of a warp stored or loaded.
  // Called by one thread; a cluster barrier has to follow.
  __device__ void InitializeBarriers(bool has_storer) const {
    const int loaders = has_storer ? 2 : 1;
    const int fills = has_storer ? 1 + 32 : 1;
    const int releases = has_storer ? 32 + kClusterBlocks - 1 : kClusterBlocks;
    for (int stage = 0; stage < kStages; ++stage) {
      MbarrierInit(FullBarrier(stage), fills);
      MbarrierInit(EmptyBarrier(stage), releases * kConsumerWarps);
    }
    for (int slot = 0; slot < kTileSlots; ++slot) {
      MbarrierInit(TileFullBarrier(slot), 1);
      MbarrierInit(TileEmptyBarrier(slot), kClusterBlocks * (loaders + kConsumerWarps));
    }
    MbarrierInit(TileRequestBarrier(), 1);
    MbarrierInit(StagedBarrier(), kConsumerWarps);
    MbarrierInit(StoredBarrier(), kConsumerWarps);
    MbarrierInit(RowWeightsBarrier(), kConsumerWarps * 32);
    FenceMbarrierInit();
  }

  // Waits until the consumers of both blocks have released the stage. They release it after the
  // wgmma instructions that read it have completed, so the barrier has no loads to order.
  __device__ void ProducerAcquire(const PipelineState<kStages>& state) const {
    const ProfileWait wait(SharedLayout::kRecorders);
    MbarrierWait(EmptyBarrier(state.index), state.parity ^ 1);
  }

  // Waits until all bytes of the stage have arrived.
  __device__ void ConsumerWait(const PipelineState<kStages>& state) const {
    const ProfileWait wait(SharedLayout::kRecorders);
    MbarrierWait(FullBarrier(state.index), state.parity);
  }

  // Returns whether they have arrived, without waiting; may miss that they just did.
  __device__ bool ConsumerTest(const PipelineState<kStages>& state) const {
    return MbarrierTestWait(FullBarrier(state.index), state.parity);
  }

  // Used in block 0 only: waits until all warps of both blocks have read the tile in the slot.
  // Before the first use of a slot the wait is for the phase before the first.
  __device__ void SchedulerAcquire(const PipelineState<kTileSlots>& slot) const {
    MbarrierWait(TileEmptyBarrier(slot.index), slot.parity ^ 1);
  }

  // Writes a tile to a slot of this block.
  __device__ void StoreTile(int slot, const Tile& tile) const {
    StoreShared(TileSlot(slot), make_uint4(tile.group, tile.m, tile.n, tile.num_m));
    StoreShared(TileSlot(slot) + 16,
                make_uint4(tile.k, tile.num_k, static_cast<uint32_t>(tile.shared), 0));
  }

  // Writes a tile to a slot of the given block and completes its full barrier.
  __device__ void SendTile(int slot, const Tile& tile, int block_rank) const {
    const uint32_t to = MapToBlock(TileSlot(slot), block_rank);
    const uint32_t full = MapToBlock(TileFullBarrier(slot), block_rank);
    MbarrierArriveExpectTxRemote(full, kTileBytes);
    StoreAsyncRemote(to, {tile.group, tile.m, tile.n, tile.num_m}, full);
    StoreAsyncRemote(to + 16, {tile.k, tile.num_k, static_cast<int32_t>(tile.shared), 0}, full);
  }

  __device__ Tile LoadTile(int slot) const {
    const uint4 first = LoadShared(TileSlot(slot));
    const uint4 second = LoadShared(TileSlot(slot) + 16);
    const auto word = [](uint32_t value) { return static_cast<int32_t>(value); };
    return {word(first.x),
            word(first.y),
            word(first.z),
            word(first.w),
            word(second.x),
            word(second.y),
            static_cast<SharedOperand>(second.z)};
  }

 private:
  __device__ uint32_t Barrier(int index) const {
    return shared_ + SharedLayout::kBarriers + index * kBarrierBytes;
  }
  __device__ uint32_t TileSlot(int slot) const {
    return shared_ + SharedLayout::kTiles + slot * kTileBytes;
  }

  uint32_t shared_;
};

// A warp's view of the ring of tile slots. Each producer and consumer warp has one.
class TileReader {
 public:
  __device__ explicit TileReader(const Pipeline& pipeline) : pipeline_(pipeline) {}

  // Called by whole warps. Waits for the next tile, loads it and releases its slot.
  __device__ Tile Next() {
    {
      const ProfileSpan span(SpanKind::kWaitTile, SharedLayout::kRecorders);
      MbarrierWait(pipeline_.TileFullBarrier(slot_.index), slot_.parity);
    }
    Tile tile = {};
    bool is_loaded = false;
    if (threadIdx.x % 32 == 0) {
      tile = pipeline_.LoadTile(slot_.index);
      is_loaded = tile.IsLoaded();
    }
    tile = {WarpUniform(tile.group),
            WarpUniform(tile.m),
            WarpUniform(tile.n),
            WarpUniform(tile.num_m),
            WarpUniform(tile.k),
            WarpUniform(tile.num_k),
            static_cast<SharedOperand>(WarpUniform(static_cast<int32_t>(tile.shared)))};
    // An arrival does not wait for earlier loads: the scheduler warp may see it, and overwrite the
    // slot, before this warp has read it. So the arrival depends on the loaded words. Without that
    // dependency about one read in 10^9 returned the slot's next tile.
    if (is_loaded) MbarrierArriveRemote(MapToBlock(pipeline_.TileEmptyBarrier(slot_.index), 0));
    slot_.Advance();
    return tile;
  }

 private:
  const Pipeline pipeline_;
  PipelineState<kTileSlots> slot_;
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_PIPELINE_CUH_
