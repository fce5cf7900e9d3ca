// The consumer warpgroups of kRhsGradient, which multiply and run the epilogue (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_RHS_GRADIENT_CONSUMER_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_RHS_GRADIENT_CONSUMER_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/epilogue/rhs_gradient_store.cuh"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/cluster.cuh"
#include "ffi/device/ptx/mbarrier.cuh"
#include "ffi/device/ptx/wgmma.cuh"

namespace jax_ep::sm90 {

// Issues the MMAs of one k-block for a consumer warpgroup. `accumulate` is false for the first
// k-block of a tile. num_k counts from this k-block on. A group's last k-block may have fewer than
// kTileK; the rest of its stage is zeros.
template <typename T>
__device__ void MultiplyKBlock(float (&accumulators)[kAccumulators], uint32_t stage, int warpgroup,
                               bool accumulate, int num_k) {
  constexpr MajorMode kMajor = MajorMode::kMajorMN;
  constexpr int kStride = kMmaK * kSwizzleBytes;  // bytes from one MMA's operand to the next
  const uint32_t a = SharedMemoryDescriptor(stage + warpgroup * kAHalfBytes, kSquareBytes);
  const uint32_t b = SharedMemoryDescriptor(stage + kABytes, kSquareBytes);
  const auto multiply = [&](int i) {
    Wgmma<T, kMajor, kMajor>(accumulators, a + i * (kStride >> 4), b + i * (kStride >> 4),
                             accumulate || i > 0);
  };
  if (num_k >= kTileK) {
    WgmmaFence();
#pragma unroll
    for (int i = 0; i < kTileK / kMmaK; ++i) multiply(i);
    WgmmaCommitGroup();
  } else {
    // Commits a wgmma group per MMA. The compiler would merge a commit that ends both branches, and
    // turn the caller's wait for all groups but one into a wait for all.
#pragma unroll 1
    for (int i = 0; i < CeilDivide(num_k, kMmaK); ++i) {
      WgmmaFence();
      multiply(i);
      WgmmaCommitGroup();
    }
  }
}

// Called by all consumer warps of a block.
template <typename T>
__device__ void RunRhsGradientConsumer(const MatmulTensorMaps& maps, const MatmulParams& params,
                                       const Pipeline& pipeline) {
  const int warp = WarpUniform(threadIdx.x / 32) - kWarpgroupWarps;  // among the consumers
  const int warpgroup = warp / kWarpgroupWarps;
  RhsGradientEpilogue<T> epilogue(maps, pipeline.Staging(warp));
  // Lanes 0 and 1 release stages, each to the producer of one block.
  const int lane = threadIdx.x % 32;
  const uint32_t empty_barriers = MapToBlock(pipeline.EmptyBarrier(0), lane % kClusterBlocks);
  const auto consumer_release = [&](int stage) {
    if (lane < kClusterBlocks) {
      MbarrierArriveRemote(empty_barriers + stage * kBarrierBytes);
    }
  };
  TileReader tiles(pipeline);
  PipelineState<kStages> state;
  bool is_full = false;  // the stage at `state` has been seen full
  float accumulators[kAccumulators];
  Tile next;
  for (Tile tile = tiles.Next(); tile.num_k > 0; tile = next) {
    // Rows past the end of the group are padding; often a warpgroup has no others.
    const bool has_rows = warpgroup * kWarpgroupM < tile.num_m;
    {
      const ProfileLoop loop(SpanKind::kMultiply, SharedLayout::kRecorders);
      int previous_stage = -1;
      for (int k = 0; k < tile.num_k; k += kTileK) {
        const uint32_t stage = pipeline.Stage(state.index);
        if (!is_full) pipeline.ConsumerWait(state);
        const int num_k = tile.num_k - k;
        const int current_stage = state.index;
        state.Advance();
        if (has_rows) {
          MultiplyKBlock<T>(accumulators, stage, warpgroup, k > 0, num_k);
          is_full = pipeline.ConsumerTest(state);
          WgmmaWaitGroup<1>();
        } else {
          is_full = false;
        }
        // The MMAs of the previous k-block are complete, so its stage has been read.
        __syncwarp();
        if (previous_stage >= 0) consumer_release(previous_stage);
        // The MMAs just issued keep the tensor cores busy meanwhile.
        if (has_rows) epilogue.RunSlice(k / kTileK);
        previous_stage = current_stage;
      }
      if (has_rows) epilogue.Finish();
      next = tiles.Next();
      WgmmaWaitGroup<0>();
      FenceAccumulators(accumulators);
      __syncwarp();
      consumer_release(previous_stage);
    }
    if (!has_rows) continue;
    const int m = warp * kWarpM;
    const EpilogueCoordinates at = {
        .group = tile.group, .m = tile.m + m, .n = tile.n, .num_m = tile.num_m - m};
    const ProfileSpan span(SpanKind::kEpilogue, SharedLayout::kRecorders);
    epilogue.Store(params, at, accumulators);
    FenceAccumulators(accumulators);
  }
  epilogue.Finish();
  epilogue.Close();
}

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_RHS_GRADIENT_CONSUMER_CUH_
