// What leads from a block's warps that copy to those that multiply (sm_90): a ring of stages, which
// the copy engine fills, and a ring of tiles, which says what the stages are of.
#ifndef JAX_EP_DEVICE_SM90_PIPELINE_CUH_
#define JAX_EP_DEVICE_SM90_PIPELINE_CUH_

#include "ffi/device/async_copy.cuh"
#include "ffi/device/mbarrier.cuh"

namespace jax_ep::sm90 {

// A block has one group of four warps for copies and tiles, and others that multiply.
inline constexpr int kGroupThreads = 128;

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
__device__ inline int Uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// A tile's part of the problem.
struct Tile {
  int32_t group;
  int32_t m;      // first row of the result; of the gradient, in its group's matrix
  int32_t n;      // first column of the result
  int32_t num_m;  // rows of the result from there on; may reach past the tile
  int32_t k;      // first of the contraction; past the operands' end where the result is zeros
  int32_t num_k;  // 0: there are no more tiles
};

// The shared memory of a block: stages, staging of results, barriers, and tiles.
template <int kStageBytes_, int kStages_, int kStagingBytes, int kConsumerWarps_>
class Pipeline {
 public:
  static constexpr int kStageBytes = kStageBytes_;
  static constexpr int kStages = kStages_;
  static constexpr int kConsumerWarps = kConsumerWarps_;
  static constexpr int kTileSlots = 2;
  static constexpr int kStaging = kStages * kStageBytes;  // where it begins

 private:
  static constexpr int kBarriers = kStaging + kStagingBytes;
  static constexpr int kNumBarriers = 2 * (kStages + kTileSlots) + 1;
  static constexpr int kTiles = kBarriers + (kNumBarriers + 1) / 2 * 16;
  static constexpr int kSlotBytes = 32;
  static_assert(kStageBytes % 1024 == 0 && kStagingBytes % 1024 == 0, "swizzle atoms are aligned");
  static_assert(sizeof(Tile) <= kSlotBytes);

 public:
  static constexpr int kSharedBytes = kTiles + kTileSlots * kSlotBytes;
  static_assert(kSharedBytes <= 227 * 1024);

  __device__ explicit Pipeline(uint32_t shared) : shared_(shared) {}

  __device__ uint32_t Stage(int stage) const { return shared_ + stage * kStageBytes; }
  __device__ uint32_t Staging() const { return shared_ + kStaging; }

  // That a stage has been filled, and that nobody reads it any more.
  __device__ uint32_t Full(int stage) const { return Barrier(stage); }
  __device__ uint32_t Empty(int stage) const { return Barrier(kStages + stage); }

  __device__ uint32_t TileFull(int slot) const { return Barrier(2 * kStages + slot); }
  __device__ uint32_t TileEmpty(int slot) const { return Barrier(2 * kStages + kTileSlots + slot); }

  // That the next tile is to be found.
  __device__ uint32_t TileWanted() const { return Barrier(kNumBarriers - 1); }

  // By one thread. The block's barrier has to follow.
  __device__ void Initialize() const {
    for (int stage = 0; stage < kStages; ++stage) {
      InitBarrier(Full(stage), 1);
      InitBarrier(Empty(stage), kConsumerWarps);
    }
    for (int slot = 0; slot < kTileSlots; ++slot) {
      InitBarrier(TileFull(slot), 1);
      InitBarrier(TileEmpty(slot), kConsumerWarps + 1);
    }
    InitBarrier(TileWanted(), 1);
    FenceBarrierInit();
  }

  __device__ static Tile* TileSlot(int slot) {
    return reinterpret_cast<Tile*>(DynamicSharedMemory() + kTiles + slot * kSlotBytes);
  }

 private:
  __device__ uint32_t Barrier(int number) const { return shared_ + kBarriers + number * 8; }

  uint32_t shared_;
};

// The ring of tiles as a warp reads it.
template <typename Pipeline>
class TileReader {
 public:
  __device__ explicit TileReader(const Pipeline& pipeline) : pipeline_(pipeline) {}

  // By whole warps. Lane 0 has read the slot, and may say so.
  __device__ Tile Next() {
    WaitBarrier(pipeline_.TileFull(slot_.index), slot_.parity);
    Tile tile = {};
    if (threadIdx.x % 32 == 0) {
      tile = *Pipeline::TileSlot(slot_.index);
      Arrive(pipeline_.TileEmpty(slot_.index));
    }
    slot_.Advance();
    return {Uniform(tile.group), Uniform(tile.m), Uniform(tile.n),
            Uniform(tile.num_m), Uniform(tile.k), Uniform(tile.num_k)};
  }

 private:
  const Pipeline pipeline_;
  Position<Pipeline::kTileSlots> slot_;
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_SM90_PIPELINE_CUH_
