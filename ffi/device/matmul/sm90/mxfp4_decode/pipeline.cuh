// Shared memory of the matmul that decodes with MXFP4 weights (sm_90), and its barriers.
//
//   full barrier       completes when the producer has announced a stage, and all of its bytes have
//                      arrived; for the first stage of a tile, the scales of the whole tile, too
//   empty barrier      completes when all consumer warps have released the stage
//   deposited barrier  completes when all consumer lanes have stored their sums of a tile, and no
//                      longer need its scales
//   added barrier      completes when all epilogue lanes have read the sums, which the next tile's
//                      may overwrite
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_PIPELINE_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_PIPELINE_CUH_

#include "ffi/device/matmul/sm90/mxfp4_decode/scales.h"
#include "ffi/device/matmul/sm90/mxfp4_decode/tiles.h"
#include "ffi/device/matmul/sm90/mxfp4_params.h"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/shapes.h"
#include "ffi/device/ptx/mbarrier.cuh"
#include "ffi/device/ptx/shared_memory.cuh"

namespace jax_ep::sm90::decode {

// Four consumer warps per scheduler hide each other's latencies. The producer warp follows them,
// and the epilogue warps. A consumer warp has 32 columns of a tile, and one k-block of every stage.
inline constexpr int kWarps = 16;
inline constexpr int kEpilogueWarps = 3;
inline constexpr int kFirstEpilogueWarp = kWarps + 1;
inline constexpr int kThreads = (kWarps + 1 + kEpilogueWarps) * 32;
inline constexpr int kWarpColumns = 32;
inline constexpr int kRowsBytes = DecodeTiles::kRows * kSwizzleBytes;
inline constexpr int kBoxKBlocks = 2 * kSwizzleBytes / kTileK;
inline constexpr int kTileBytes = 32;
inline constexpr int kScaleSlots = 2;
inline constexpr int kScalesBoxBytes = 4 * DecodeScales::kBoxWords;
inline constexpr int kMaxScales = DecodeScales::kMaxPerColumn;

// The shape of a tile and its stages, and the shared memory of a block: byte offsets.
//
// A stage has the rows, as squares of one k-block, and the weights, as boxes of four k-blocks, in
// which a column is a line. Scales have a slot for a tile and one for the next.
//
// `kPartsOfK`: k-blocks of a stage. Tiles are the narrower the more there are.
template <int kPartsOfK, int kNumStages>
struct Shape {
  static constexpr int kParts = kPartsOfK;
  static constexpr int kColumnWarps = kWarps / kParts;
  static constexpr int kColumns = kColumnWarps * kWarpColumns;

  static constexpr int kStages = kNumStages;
  static constexpr int kStageK = kParts * kTileK;
  static constexpr int kStageBlocks = kStageK / kMxFp4Block;
  static constexpr int kWeightsAt = kParts * kRowsBytes;
  static constexpr int kBoxBytes = kColumns * kSwizzleBytes;
  static constexpr int kBoxes = kParts / kBoxKBlocks;
  static constexpr int kStageBytes = kWeightsAt + kBoxes * kBoxBytes;
  static_assert(kBoxBytes % 1024 == 0, "swizzle atoms begin at multiples of 1024 bytes");

  // The scales of a tile: those of a column follow those of the one before.
  static constexpr int kScalesBytes = kColumns * kMaxScales;
  static_assert(kScalesBytes % kScalesBoxBytes == 0);

  // Sums of a part, in float32: lines of a row. Their stride lets lanes of different rows store to
  // different banks.
  static constexpr int kSumsLine = (kColumns + 4) * 4;
  static constexpr int kPartBytes = DecodeTiles::kRows * kSumsLine;

  static constexpr int kScales = kStages * kStageBytes;
  static constexpr int kSums = kScales + kScaleSlots * kScalesBytes;
  static constexpr int kTiles = kSums + kParts * kPartBytes;
  static constexpr int kBarriers = kTiles + (kStages + 1) * kTileBytes;
  static constexpr int kRecorders = kBarriers + (2 * kStages + kScaleSlots + 1) * kBarrierBytes;
  static constexpr int kBytes = kRecorders + kThreads / 32 * kRecorderBytes;
  static_assert(kBytes <= 227 * 1024, "the limit per block of sm_90");
};

// Narrow tiles spread few weights over more blocks, and have more to add at their ends.
using WideShape = Shape<4, 7>;
using NarrowShape = Shape<8, 5>;

// A tile of the result. num_k is 0 after the last one.
struct Tile {
  int32_t group;
  int32_t m;
  int32_t n;
  int32_t num_m;
  int32_t num_k;
};

template <typename Shape>
class Pipeline {
 public:
  using State = PipelineState<Shape::kStages>;
  using TileState = PipelineState<kScaleSlots>;

  __device__ explicit Pipeline(uint32_t shared) : shared_(shared) {}

  __device__ uint32_t Stage(int stage) const { return shared_ + stage * Shape::kStageBytes; }
  __device__ uint32_t Scales(int slot) const {
    return shared_ + Shape::kScales + slot * Shape::kScalesBytes;
  }
  __device__ uint32_t Sums(int part) const {
    return shared_ + Shape::kSums + part * Shape::kPartBytes;
  }

  __device__ uint32_t FullBarrier(int stage) const { return Barrier(stage); }
  __device__ uint32_t EmptyBarrier(int stage) const { return Barrier(Shape::kStages + stage); }
  __device__ uint32_t DepositedBarrier(int slot) const {
    return Barrier(2 * Shape::kStages + slot);
  }
  __device__ uint32_t AddedBarrier() const { return Barrier(2 * Shape::kStages + kScaleSlots); }

  // Called by one thread; a barrier of the block has to follow.
  __device__ void InitializeBarriers() const {
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      MbarrierInit(FullBarrier(stage), 1);
      MbarrierInit(EmptyBarrier(stage), kWarps);
    }
    for (int slot = 0; slot < kScaleSlots; ++slot) {
      MbarrierInit(DepositedBarrier(slot), kWarps * 32);
    }
    MbarrierInit(AddedBarrier(), kEpilogueWarps * 32);
    FenceMbarrierInit();
  }

  __device__ void ProducerAcquire(const State& state) const {
    const ProfileWait wait(Shape::kRecorders);
    MbarrierWait(EmptyBarrier(state.index), state.parity ^ 1);
  }
  __device__ void ConsumerWait(const State& state) const {
    const ProfileWait wait(Shape::kRecorders);
    MbarrierWait(FullBarrier(state.index), state.parity);
  }

  // Called by whole warps, after the instructions that use what they loaded.
  __device__ void Arrive(uint32_t barrier) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) MbarrierArrive(barrier);
  }

  // A tile lies beside its first stage, and is covered by the same barriers.
  __device__ void StoreTile(int stage, const Tile& tile) const {
    StoreShared(TileAt(stage), make_uint4(tile.group, tile.m, tile.n, tile.num_m));
    StoreShared(TileAt(stage) + 16, make_uint4(tile.num_k, 0, 0, 0));
  }
  // Only the lane that releases the stage reads it.
  __device__ Tile LoadTile(int stage) const {
    uint4 first = {}, second = {};
    if (threadIdx.x % 32 == 0) {
      first = LoadShared(TileAt(stage));
      second = LoadShared(TileAt(stage) + 16);
    }
    const auto word = [](uint32_t value) { return WarpUniform(static_cast<int32_t>(value)); };
    return {word(first.x), word(first.y), word(first.z), word(first.w), word(second.x)};
  }

  // The tile whose sums lie in shared memory.
  __device__ void StoreDeposited(const Tile& tile) const { StoreTile(Shape::kStages, tile); }
  __device__ Tile LoadDeposited() const {
    const uint4 first = LoadShared(TileAt(Shape::kStages));
    const uint4 second = LoadShared(TileAt(Shape::kStages) + 16);
    const auto word = [](uint32_t value) { return static_cast<int32_t>(value); };
    return {word(first.x), word(first.y), word(first.z), word(first.w), word(second.x)};
  }

 private:
  __device__ uint32_t Barrier(int index) const {
    return shared_ + Shape::kBarriers + index * kBarrierBytes;
  }
  __device__ uint32_t TileAt(int stage) const {
    return shared_ + Shape::kTiles + stage * kTileBytes;
  }

  uint32_t shared_;
};

}  // namespace jax_ep::sm90::decode

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_PIPELINE_CUH_
