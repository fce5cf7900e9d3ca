// The consumer warpgroups of the FP8 matmul, which multiply, promote and store (sm_90).
//
// The tensor cores add 8-bit products with about 14 bits. So the products of each k-block of 128
// start from zero, and the threads add them to float32 sums, times their scales. A warpgroup
// multiplies 64 x 128 at a time, because products of 64 x 256 and their sums exceed the registers.
// While one warpgroup promotes, the tensor cores run the MMAs of the other.
//
// With Epilogue::kReadsAhead the ends of tiles are short: in the last k-block a warp reads the next
// tile, loads its first scales, and stores the first half. That leaves registers to load scales one
// k-block ahead, otherwise up to three. Where tiles have many k-blocks, the latter counts.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_FP8_CONSUMER_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_FP8_CONSUMER_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/fp8_scales.cuh"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/cluster.cuh"
#include "ffi/device/ptx/mbarrier.cuh"
#include "ffi/device/ptx/wgmma_fp8.cuh"

namespace jax_ep::sm90 {

inline constexpr int kFp8MmaBytes = 32;  // one wgmma reads so much of a line

// Issues the MMAs of one k-block for half of the tile's columns.
template <typename A, typename B>
__device__ void MultiplyHalf(float (&products)[kHalfAccumulators], uint32_t stage, int warpgroup,
                             int half) {
  const uint32_t a = SharedMemoryDescriptor(stage + warpgroup * kAHalfBytes, kSquareBytes);
  const uint32_t b = SharedMemoryDescriptor(stage + kABytes + half * kBHalfBytes, kSquareBytes);
  FenceAccumulators(products);
  WgmmaFence();
#pragma unroll
  for (int i = 0; i < kSwizzleBytes / kFp8MmaBytes; ++i) {
    WgmmaFp8<A, B>(products, a + i * (kFp8MmaBytes >> 4), b + i * (kFp8MmaBytes >> 4), i > 0);
  }
  WgmmaCommitGroup();
}

// Adds the products of a k-block to the sums.
template <typename Scales>
__device__ void Promote(float (&sums)[kHalfAccumulators],
                        const float (&products)[kHalfAccumulators], float2 by_row) {
#pragma unroll
  for (int i = 0; i < kHalfAccumulators; ++i) {
    sums[i] = Scales::kPerKBlock ? fmaf(products[i], i / 2 % 2 == 0 ? by_row.x : by_row.y, sums[i])
                                 : sums[i] + products[i];
  }
}

// Called by all consumer warps of a block.
template <typename A, typename B, typename Scales, typename Epilogue>
__device__ void RunFp8Consumer(const MatmulTensorMaps& maps, const MatmulParams& params,
                               const Fp8Scales& scales, const Pipeline& pipeline) {
  const int warp = WarpUniform(threadIdx.x / 32) - kWarpgroupWarps;  // among the consumers
  const int warpgroup = warp / kWarpgroupWarps;
  Epilogue epilogue(params, scales, maps, pipeline.Staging(warp));
  // Lanes 0 and 1 release stages, each to the producer of one block.
  const int lane = threadIdx.x % 32;
  const uint32_t empty_barriers = MapToBlock(pipeline.EmptyBarrier(0), lane % kClusterBlocks);
  const auto consumer_release = [&](int stage) {
    __syncwarp();
    if (lane < kClusterBlocks) {
      MbarrierArriveRemote(empty_barriers + stage * kBarrierBytes);
    }
  };
  constexpr bool kReadsAhead = Epilogue::kReadsAhead;
  const auto place = [&](const Tile& tile) -> EpilogueCoordinates {
    const int m = warp * kWarpM;
    // A tile of zeros has a k past the end of the operands.
    const int group = tile.k > 0 ? -1 : tile.group;
    return {.group = group, .m = tile.m + m, .n = tile.n, .num_m = tile.num_m - m};
  };
  const auto load_scales = [&](const Tile& tile, int k_block) {
    return Scales::Load(scales, place(tile), k_block);
  };
  TileReader tiles(pipeline);
  PipelineState<kStages> state;
  float sums[kHalves][kHalfAccumulators] = {};
  float products[kHalfAccumulators];
  Tile tile;
  KBlockScales quad;
  const auto read_tile = [&] {
    tile = tiles.Next();
    quad = load_scales(tile, 0);
  };
  read_tile();
  while (tile.num_k > 0) {
    const int num_k_blocks = CeilDivide(tile.num_k, kTileK);
    // Rows past the end of the group are padding; often a warpgroup has no others.
    if (warpgroup * kWarpgroupM >= tile.num_m) {
      for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
        pipeline.ConsumerWait(state);
        consumer_release(state.index);
        state.Advance();
      }
      read_tile();
      continue;
    }
    KBlockScales next_quad, block_scales;
    for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
      const bool is_last = k_block + 1 == num_k_blocks;
      const uint32_t stage = pipeline.Stage(state.index);
      pipeline.ConsumerWait(state);
      MultiplyHalf<A, B>(products, stage, warpgroup, 0);
      // A load whose result is used at once would stop the warp for longer than the MMAs take.
      if (!kReadsAhead && k_block % kQuad == 0) next_quad = load_scales(tile, k_block + kQuad);
      if (k_block == 0) {
        epilogue.StoreSecond(sums);
        block_scales = Scales::Select(quad, 0);
      }
      if (kReadsAhead && is_last) {
        epilogue.Load(place(tile));
        read_tile();
      }
      WgmmaWaitGroup<0>();
      FenceAccumulators(products);
      Promote<Scales>(sums[0], products, block_scales.ByRow(0));
      const float2 by_row = block_scales.ByRow(1);
      MultiplyHalf<A, B>(products, stage, warpgroup, 1);
      if (kReadsAhead && is_last) {
        epilogue.StoreFirst(sums[0]);
      } else {
        if (!kReadsAhead && k_block % kQuad == kQuad - 1) quad = next_quad;
        block_scales = Scales::Select(quad, k_block + 1);
        if (kReadsAhead && k_block % kQuad == kQuad - 2) quad = load_scales(tile, k_block + 2);
      }
      WgmmaWaitGroup<0>();
      FenceAccumulators(products);
      consumer_release(state.index);
      state.Advance();
      Promote<Scales>(sums[1], products, by_row);
    }
    if constexpr (!kReadsAhead) {
      epilogue.Load(place(tile));
      epilogue.StoreFirst(sums[0]);
      read_tile();
    }
  }
  epilogue.StoreSecond(sums);
  epilogue.Close();
}

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_FP8_CONSUMER_CUH_
