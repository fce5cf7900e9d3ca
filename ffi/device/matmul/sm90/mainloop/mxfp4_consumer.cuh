// The consumer warpgroups of a matmul of bfloat16 rows and MXFP4 weights (sm_90).
//
// A thread expands the weights that it multiplies, to registers: each k-block's while the MMAs of
// the one before run. They read registers, too, so there are two sets. Tiles of few rows have a
// loop of their own (mxfp4_few_rows.cuh).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_CONSUMER_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_CONSUMER_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/mainloop/mxfp4_few_rows.cuh"
#include "ffi/device/matmul/sm90/mainloop/mxfp4_weights.cuh"
#include "ffi/device/matmul/sm90/mainloop/swapped_consumer.cuh"
#include "ffi/device/matmul/sm90/mxfp4_shapes.h"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/cluster.cuh"
#include "ffi/device/ptx/wgmma.cuh"
#include "ffi/device/ptx/wgmma_registers.cuh"

namespace jax_ep::sm90 {

template <MatmulKind kKind>
struct MxFp4EpilogueSelector {
  using Type = SwappedStoreEpilogue<BFloat16>;
};
template <>
struct MxFp4EpilogueSelector<MatmulKind::kActivation> {
  using Type = SwappedActivationEpilogue<BFloat16, GateLimits>;
};

template <MatmulKind kKind>
class MxFp4Consumer {
 public:
  // `limits`: the GateLimits of an activation.
  template <typename... Limits>
  __device__ MxFp4Consumer(const MatmulTensorMaps& maps, const MatmulParams& params,
                           const MxFp4Scales& scales, const Pipeline& pipeline,
                           const Limits&... limits)
      : params_(params),
        pipeline_(pipeline),
        warp_(WarpUniform(threadIdx.x / 32) - kWarpgroupWarps),
        empty_barriers_(MapToBlock(pipeline.EmptyBarrier(0), threadIdx.x % 32 % kClusterBlocks)),
        epilogue_(params, maps, pipeline, warp_, limits...),
        scales_(scales) {}

  // Called by all consumer warps of a block.
  __device__ __forceinline__ void Run() {
    TileReader tiles(pipeline_);
    Tile tile = tiles.Next();
    if (tile.num_k > 0) BeginScales(tile);
    while (tile.num_k > 0) {
      // A span of the results would spill registers where they have an activation.
      const ProfileLoop loop(SpanKind::kMultiply, SharedLayout::kRecorders);
      epilogue_.BeginTile(tile);
      const EpilogueCoordinates at = {
          .group = tile.group, .m = tile.m, .n = tile.n, .num_m = tile.num_m};
      const auto finish = [&] {
        epilogue_.Finish();
        tile = tiles.Next();
        if (tile.num_k > 0) BeginScales(tile);
      };
      const bool is_narrow = tile.shared == SharedOperand::kANarrow;
      if (is_narrow && tile.num_m <= kMxFp4FewRows) {
        float few[kAccumulators] = {};
        if (tile.num_m <= 8) {
          MultiplyFewRows<1>(few, tile, finish);
        } else if (tile.num_m <= 16) {
          MultiplyFewRows<2>(few, tile, finish);
        } else {
          MultiplyFewRows<4>(few, tile, finish);
        }
        ReleaseLast();
        epilogue_.template Store<kMxFp4FewRows>(params_, at, kConsumerWarpgroups, few);
      } else {
        float accumulators[kAccumulators] = {};
        if (is_narrow) {
          MultiplyTile<true>(accumulators, tile, finish);
        } else {
          MultiplyTile<false>(accumulators, tile, finish);
        }
        ReleaseLast();
        epilogue_.Store(params_, at, kConsumerWarpgroups, accumulators);
        FenceAccumulators(accumulators);
      }
    }
    epilogue_.Finish();
    epilogue_.Close();
  }

 private:
  using Weights = uint32_t[kWgmmaRegisters];

  // Loads the first scales of a tile, for which its multiplication would wait. Columns past the end
  // have those of the last one: their results are not stored.
  __device__ void BeginScales(const Tile& tile) {
    int64_t matrix = int64_t{tile.group} * params_.shape_n;
    int column = tile.n + warp_ * kWarpM + threadIdx.x % 32 / 4;
    if (kIsActivation<kKind> && params_.epilogue.activation.is_gated) {
      // A matrix has the columns of the gate, then those of up, which the second warpgroup has.
      matrix *= 2;
      if (warp_ >= kWarpgroupWarps) {
        matrix += params_.shape_n;
        column -= kWarpgroupM;
      }
    }
    const int first = min(column, params_.shape_n - 1);
    const int second = min(column + 8, params_.shape_n - 1);
    scales_.Begin(matrix + first, second - first, tile.k / kMxFp4Block);
  }

  // Lanes 0 and 1 release stages, each to the producer of one block.
  __device__ void Release(int stage) const {
    if (threadIdx.x % 32 < kClusterBlocks) {
      MbarrierArriveRemote(empty_barriers_ + stage * kBarrierBytes);
    }
  }

  __device__ void ReleaseLast() {
    __syncwarp();
    Release(state_.index);
    state_.Advance();
  }

  // Multiplies all stages of a tile, of which the last one is not released. Calls function() while
  // the last MMAs run.
  template <bool kIsNarrow, typename Function>
  __device__ __forceinline__ void MultiplyTile(float (&accumulators)[kAccumulators],
                                               const Tile& tile, const Function& function) {
    const int index = (tile.num_m - 1) / kSwappedRowUnit;
    const int k_blocks = CeilDivide(tile.num_k, kTileK);
    const MxFp4Lines<kIsNarrow> lines(warp_);
    Weights even, odd;  // hold k-blocks of even and of odd indices
    pipeline_.ConsumerWait(state_);
    scales_.Next();
    ExpandKBlock<false>(lines, scales_, pipeline_.Stage(state_.index), 0, even);
#pragma unroll 1
    for (int k_block = 0; k_block < k_blocks; k_block += 2) {
      MultiplyKBlock<false>(accumulators, lines, k_block, k_blocks, index, even, odd);
      if (k_block + 1 == k_blocks) break;
      MultiplyKBlock<true>(accumulators, lines, k_block + 1, k_blocks, index, odd, even);
    }
    function();
    WgmmaWaitGroup<0>();
    FenceAccumulators(accumulators);
    FenceRegisters(even);
    FenceRegisters(odd);
  }

  // Issues the MMAs of a k-block, whose weights are expanded, and expands those of the next one.
  template <bool kIsOdd, bool kIsNarrow>
  __device__ __forceinline__ void MultiplyKBlock(float (&accumulators)[kAccumulators],
                                                 const MxFp4Lines<kIsNarrow>& lines, int k_block,
                                                 int k_blocks, int index, Weights& weights,
                                                 Weights& next) {
    constexpr int kGroup = MxFp4WarpScales::kGroupKBlocks;
    const int in_group = k_block % kGroup;
    const uint32_t rows = SharedMemoryDescriptor(
        pipeline_.Stage(state_.index) + (kIsNarrow ? in_group * kSwappedNarrowRowsBytes : 0),
        kSquareBytes);
    if constexpr (kIsNarrow) {
      WgmmaRegistersFewColumns(accumulators, weights, rows, k_block > 0, index);
    } else {
      WgmmaRegistersAnyColumns(accumulators, weights, rows, k_block > 0, index);
    }
    WgmmaWaitGroup<1>();
    // The MMAs of the k-block before are complete. They have read its stage and `next`.
    FenceRegisters(next);
    if (k_block > 0 && (!kIsNarrow || (!kIsOdd && in_group == 0))) {
      __syncwarp();
      Release((state_.index + kStages - 1) % kStages);
    }
    // Before the expansion, which needs the registers that the slice has.
    epilogue_.LoadAndRunSlice(k_block);
    if (k_block + 1 >= k_blocks) return;
    const int next_in_group = (k_block + 1) % kGroup;
    const bool begins_group = kIsOdd && next_in_group == 0;
    if (!kIsNarrow || begins_group) {
      state_.Advance();
      pipeline_.ConsumerWait(state_);
    }
    if (begins_group) scales_.Next();
    ExpandKBlock<!kIsOdd>(lines, scales_, pipeline_.Stage(state_.index), next_in_group, next);
  }

  // MultiplyTile of a narrow tile of at most 8 * kUnits rows.
  template <int kUnits, typename Function>
  __device__ __forceinline__ void MultiplyFewRows(float (&accumulators)[kAccumulators],
                                                  const Tile& tile, const Function& function) {
    MxFp4FewRows<kUnits> product(warp_);
    const int k_blocks = CeilDivide(tile.num_k, kTileK);
    int stage = 0;
#pragma unroll 1
    for (int left = k_blocks;; left -= kMxFp4NarrowKBlocks) {
      epilogue_.LoadSlice(stage);
      scales_.Next();
      pipeline_.ConsumerWait(state_);
      product.MultiplyStage(scales_, pipeline_.Stage(state_.index), left);
      epilogue_.RunSlice(stage++);
      if (left <= kMxFp4NarrowKBlocks) break;
      __syncwarp();
      Release(state_.index);
      state_.Advance();
    }
    function();
    product.Get(accumulators);
  }

  const MatmulParams& params_;
  const Pipeline pipeline_;
  const int warp_;  // among the consumers
  const uint32_t empty_barriers_;
  typename MxFp4EpilogueSelector<kKind>::Type epilogue_;
  MxFp4WarpScales scales_;
  PipelineState<kStages> state_;
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_CONSUMER_CUH_
