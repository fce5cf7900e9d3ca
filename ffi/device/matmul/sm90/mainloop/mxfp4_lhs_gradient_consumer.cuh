// The consumer warpgroups of a matmul that contracts bfloat16 rows and the columns of MXFP4 weights
// (sm_90).
//
// As in mxfp4_consumer.cuh, a thread expands each k-block's weights while the MMAs of the one
// before run.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_LHS_GRADIENT_CONSUMER_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_LHS_GRADIENT_CONSUMER_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/epilogue/column_pair_staging.cuh"
#include "ffi/device/matmul/sm90/epilogue/swapped_store.cuh"
#include "ffi/device/matmul/sm90/mainloop/mxfp4_lhs_gradient_weights.cuh"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/cluster.cuh"
#include "ffi/device/ptx/wgmma.cuh"
#include "ffi/device/ptx/wgmma_registers.cuh"

namespace jax_ep::sm90 {

class MxFp4LhsGradientConsumer {
 public:
  __device__ MxFp4LhsGradientConsumer(const MatmulTensorMaps& maps, const MatmulParams& params,
                                      const Pipeline& pipeline)
      : params_(params),
        pipeline_(pipeline),
        warp_(WarpUniform(threadIdx.x / 32) - kWarpgroupWarps),
        empty_barriers_(MapToBlock(pipeline.EmptyBarrier(0), ClusterRank() ^ 1)),
        weights_(warp_),
        epilogue_(params, maps, pipeline, warp_) {}

  // Called by all consumer warps of a block.
  __device__ __forceinline__ void Run() {
    TileReader tiles(pipeline_);
    Tile tile = tiles.Next();
    while (tile.num_k > 0) {
      float accumulators[kAccumulators] = {};
      const EpilogueCoordinates at = {
          .group = tile.group, .m = tile.m, .n = tile.n, .num_m = tile.num_m};
      const auto finish = [&] {
        epilogue_.Finish();
        tile = tiles.Next();
      };
      {
        const ProfileLoop loop(SpanKind::kMultiply, SharedLayout::kRecorders);
        if (tile.shared == SharedOperand::kANarrow) {
          MultiplyTile<true>(accumulators, tile, finish);
        } else {
          MultiplyTile<false>(accumulators, tile, finish);
        }
        __syncwarp();
        Release(state_.index);
        state_.Advance();
      }
      const ProfileSpan span(SpanKind::kEpilogue, SharedLayout::kRecorders);
      epilogue_.Store(params_, at, kConsumerWarpgroups, accumulators);
      FenceAccumulators(accumulators);
    }
    epilogue_.Finish();
    epilogue_.Close();
  }

 private:
  using Expanded = uint32_t[kWgmmaRegisters];

  // Each lane releases a stage to the warps that fill it, and one to the producer of the other
  // block.
  __device__ void Release(int stage) const {
    MbarrierArrive(pipeline_.EmptyBarrier(stage));
    if (threadIdx.x % 32 == 0) MbarrierArriveRemote(empty_barriers_ + stage * kBarrierBytes);
  }

  // Multiplies all stages of a tile, of which the last one is not released. Calls function() while
  // the last MMAs run.
  template <bool kIsNarrow, typename Function>
  __device__ __forceinline__ void MultiplyTile(float (&accumulators)[kAccumulators],
                                               const Tile& tile, const Function& function) {
    const int index = (tile.num_m - 1) / kSwappedRowUnit;
    const int k_blocks = CeilDivide(tile.num_k, kTileK);
    Expanded even, odd;  // hold k-blocks of even and of odd indices
    in_stage_ = 0;
    pipeline_.ConsumerWait(state_);
    weights_.Expand(pipeline_.Stage(state_.index), 0, even);
#pragma unroll 1
    for (int k_block = 0; k_block < k_blocks; k_block += 2) {
      MultiplyKBlock<kIsNarrow>(accumulators, k_block, k_blocks, index, even, odd);
      if (k_block + 1 == k_blocks) break;
      MultiplyKBlock<kIsNarrow>(accumulators, k_block + 1, k_blocks, index, odd, even);
    }
    function();
    WgmmaWaitGroup<0>();
    FenceAccumulators(accumulators);
    FenceRegisters(even);
    FenceRegisters(odd);
  }

  // Issues the MMAs of a k-block, whose weights are expanded, and expands those of the next one.
  template <bool kIsNarrow>
  __device__ __forceinline__ void MultiplyKBlock(float (&accumulators)[kAccumulators], int k_block,
                                                 int k_blocks, int index, Expanded& expanded,
                                                 Expanded& next) {
    const uint32_t rows = SharedMemoryDescriptor(
        pipeline_.Stage(state_.index) + in_stage_ * kSwappedNarrowRowsBytes, kSquareBytes);
    if constexpr (kIsNarrow) {
      WgmmaRegistersFewColumns(accumulators, expanded, rows, k_block > 0, index);
    } else {
      WgmmaRegistersAnyColumns(accumulators, expanded, rows, k_block > 0, index);
    }
    WgmmaWaitGroup<1>();
    // The MMAs of the k-block before are complete. They have read its stage and `next`.
    FenceRegisters(next);
    if (k_block > 0 && in_stage_ == 0) {
      __syncwarp();
      Release((state_.index + kStages - 1) % kStages);
    }
    // Before the expansion, which needs the registers that the slice has.
    epilogue_.LoadAndRunSlice(k_block);
    if (k_block + 1 >= k_blocks) return;
    if (!kIsNarrow || ++in_stage_ == kLhsGradientNarrowKBlocks) {
      in_stage_ = 0;
      state_.Advance();
      pipeline_.ConsumerWait(state_);
    }
    weights_.Expand(pipeline_.Stage(state_.index), in_stage_, next);
  }

  const MatmulParams& params_;
  const Pipeline pipeline_;
  const int warp_;                 // among the consumers
  const uint32_t empty_barriers_;  // those of the other block
  const MxFp4TransposedWeights weights_;
  SwappedStoreEpilogue<BFloat16, ColumnPairStaging> epilogue_;
  PipelineState<kStages> state_;
  int in_stage_ = 0;  // the k-block of a narrow tile
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_MXFP4_LHS_GRADIENT_CONSUMER_CUH_
