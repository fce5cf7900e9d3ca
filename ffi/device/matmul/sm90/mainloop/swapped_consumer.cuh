// The consumer warpgroups of a matmul with swapped operands (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_SWAPPED_CONSUMER_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_SWAPPED_CONSUMER_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/epilogue/swapped_activation.cuh"
#include "ffi/device/matmul/sm90/epilogue/swapped_activation_gradient.cuh"
#include "ffi/device/matmul/sm90/epilogue/swapped_store.cuh"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/shapes.h"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/cluster.cuh"
#include "ffi/device/ptx/wgmma.cuh"
#include "ffi/device/ptx/wgmma_columns.cuh"

namespace jax_ep::sm90 {

template <typename T, MatmulKind kKind>
struct SwappedEpilogueSelector {
  using Type = SwappedStoreEpilogue<T>;
};
template <typename T>
struct SwappedEpilogueSelector<T, MatmulKind::kActivation> {
  using Type = SwappedActivationEpilogue<T>;
};
template <typename T>
struct SwappedEpilogueSelector<T, MatmulKind::kActivationGradient> {
  using Type = SwappedActivationGradientEpilogue<T>;
};

template <typename T, MatmulKind kKind, typename Raster>
class SwappedConsumer {
 public:
  __device__ SwappedConsumer(const MatmulTensorMaps& maps, const MatmulParams& params,
                             const Pipeline& pipeline)
      : params_(params),
        pipeline_(pipeline),
        warp_(WarpUniform(threadIdx.x / 32) - kWarpgroupWarps),
        empty_barriers_(MapToBlock(pipeline.EmptyBarrier(0), threadIdx.x % 32 % kClusterBlocks)),
        epilogue_(params, maps, pipeline, warp_) {}

  // Called by all consumer warps of a block.
  __device__ __forceinline__ void Run() {
    TileReader tiles(pipeline_);
    float accumulators[kAccumulators];
    Tile next;
    for (Tile tile = tiles.Next(); tile.num_k > 0; tile = next) {
      const bool is_narrow = tile.shared == SharedOperand::kANarrow || IsHalfOfRows(tile);
      const bool is_wide = kHasWideTiles<Raster> && tile.shared == SharedOperand::kAWide;
      const int num_warpgroups = is_narrow && IsHalfOfColumns(tile) ? 1 : kConsumerWarpgroups;
      {
        const ProfileLoop loop(SpanKind::kMultiply, SharedLayout::kRecorders);
        previous_stage_ = -1;
        epilogue_.BeginTile(tile);
        if (warp_ / kWarpgroupWarps >= num_warpgroups) {
          PassTile(tile);
        } else if (is_narrow) {
          MultiplyTile<true>(accumulators, tile);
        } else if (is_wide) {
          MultiplyTile<false, true>(accumulators, tile);
        } else {
          MultiplyTile<false>(accumulators, tile);
        }
        epilogue_.Finish();
        next = tiles.Next();
        WgmmaWaitGroup<0>();
        FenceAccumulators(accumulators);
        __syncwarp();
        if (previous_stage_ >= 0) Release(previous_stage_);
      }
      const EpilogueCoordinates at = {.group = tile.group,
                                      .m = tile.m,
                                      .n = tile.n,
                                      .num_m = tile.num_m,
                                      .second_half_columns = is_wide ? params_.out_tile_n : 0};
      const ProfileSpan span(SpanKind::kEpilogue, SharedLayout::kRecorders);
      epilogue_.Store(params_, at, num_warpgroups, accumulators);
      FenceAccumulators(accumulators);
    }
    epilogue_.Finish();
    epilogue_.Close();
  }

 private:
  static constexpr MajorMode kMajor =
      kHasTransposedB<kKind> ? MajorMode::kMajorK : MajorMode::kMajorMN;

  // Return whether a narrow tile has half of a tile's columns, those of the first warpgroup (see
  // SwappedTilePairs), or half of its rows (see SwappedWideTilePairs).
  __device__ bool IsHalfOfColumns(const Tile& tile) const {
    return params_.halves_columns && !IsHalfOfRows(tile);
  }
  __device__ static bool IsHalfOfRows(const Tile& tile) {
    return kHasWideTiles<Raster> && tile.shared == SharedOperand::kBNarrow;
  }

  // Lanes 0 and 1 release stages, each to the producer of one block.
  __device__ void Release(int stage) const {
    if (threadIdx.x % 32 < kClusterBlocks) {
      MbarrierArriveRemote(empty_barriers_ + stage * kBarrierBytes);
    }
  }

  // Multiplies all stages of a tile: of a narrow or wide one, or of another. The MMAs of the last
  // one may be running afterwards.
  template <bool kIsNarrow, bool kIsWide = false>
  __device__ __forceinline__ void MultiplyTile(float (&accumulators)[kAccumulators],
                                               const Tile& tile) {
    const int warpgroup = warp_ / kWarpgroupWarps;
    constexpr int kRowsBytes = kIsNarrow ? 2 * kSwappedNarrowRowsBytes
                               : kIsWide ? kSwappedWideRowsBytes
                                         : kSwappedRowsBytes;
    const int columns_at = kRowsBytes + warpgroup * kSquareBytes;
    const int index = (tile.num_m - 1) / kSwappedRowUnit;
    const int stages = CeilDivide(tile.num_k, kIsNarrow ? kSwappedNarrowK : kTileK);
#pragma unroll 1
    for (int k_block = 0; k_block < stages; ++k_block) {
      const uint32_t stage = pipeline_.Stage(state_.index);
      epilogue_.LoadSlice(k_block);
      if (!is_full_) pipeline_.ConsumerWait(state_);
      const int current_stage = state_.index;
      state_.Advance();
      const uint32_t columns = SharedMemoryDescriptor(stage + columns_at, kSquareBytes);
      const uint32_t rows = SharedMemoryDescriptor(stage, kSquareBytes);
      if constexpr (kIsNarrow) {
        const int second_columns = IsHalfOfColumns(tile) ? kSquareBytes : kSwappedBBytes;
        WgmmaFewColumns<T, kMajor>(accumulators, columns, rows, second_columns >> 4,
                                   kSwappedNarrowRowsBytes >> 4, k_block > 0, index);
      } else if constexpr (kIsWide) {
        MultiplyWide(accumulators, stage, warpgroup, k_block > 0);
      } else {
        WgmmaAnyColumns<T, kMajor>(accumulators, columns, rows, k_block > 0, index);
      }
      is_full_ = pipeline_.ConsumerTest(state_);
      // Reading memory bounds narrow tiles: a stage that is released at once is one more to load.
      WgmmaWaitGroup<kIsNarrow ? 0 : 1>();
      // The MMAs of the previous k-block are complete, so its stage has been read.
      __syncwarp();
      if constexpr (kIsNarrow) {
        Release(current_stage);
      } else {
        if (previous_stage_ >= 0) Release(previous_stage_);
        previous_stage_ = current_stage;
      }
      // The MMAs just issued keep the tensor cores busy meanwhile.
      epilogue_.RunSlice(k_block);
    }
  }

  // Issues and commits the MMAs of a k-block of a wide tile. Their rows are the tile's, 64 per
  // warpgroup, and their columns all of the tile's.
  __device__ __forceinline__ static void MultiplyWide(float (&accumulators)[kAccumulators],
                                                      uint32_t stage, int warpgroup,
                                                      bool accumulate) {
    constexpr uint32_t kRowStep = kMmaK * 2 >> 4;  // in units of descriptors
    constexpr uint32_t kColumnStep =
        kMajor == MajorMode::kMajorK ? kRowStep : kMmaK * kSwizzleBytes >> 4;
    const uint32_t rows = SharedMemoryDescriptor(stage + warpgroup * kSquareBytes, kSquareBytes);
    const uint32_t columns = SharedMemoryDescriptor(stage + kSwappedWideRowsBytes, kSquareBytes);
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < kTileK / kMmaK; ++i) {
      Wgmma<T, MajorMode::kMajorK, kMajor>(accumulators, rows + i * kRowStep,
                                           columns + i * kColumnStep, accumulate || i > 0);
    }
    WgmmaCommitGroup();
  }

  // Releases the stages of a tile of which this warp has nothing to multiply. It still has results
  // of the tile before, which the other warpgroup may wait for.
  __device__ __forceinline__ void PassTile(const Tile& tile) {
    const int stage_k = tile.shared == SharedOperand::kANarrow ? kSwappedNarrowK : kTileK;
    const int stages = CeilDivide(tile.num_k, stage_k);
#pragma unroll 1
    for (int k_block = 0; k_block < stages; ++k_block) {
      epilogue_.LoadSlice(k_block);
      if (!is_full_) pipeline_.ConsumerWait(state_);
      is_full_ = false;
      __syncwarp();
      Release(state_.index);
      state_.Advance();
      epilogue_.RunSlice(k_block);
    }
  }

  const MatmulParams& params_;
  const Pipeline pipeline_;
  const int warp_;  // among the consumers
  const uint32_t empty_barriers_;
  typename SwappedEpilogueSelector<T, kKind>::Type epilogue_;
  PipelineState<kStages> state_;
  bool is_full_ = false;  // the stage at state_ has been seen full
  int previous_stage_ = -1;
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_SWAPPED_CONSUMER_CUH_
