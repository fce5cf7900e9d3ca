// The consumer warpgroups of a block, which multiply and run the epilogue (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_CONSUMER_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_CONSUMER_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/epilogue.cuh"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/cluster.cuh"
#include "ffi/device/ptx/mbarrier.cuh"
#include "ffi/device/ptx/wgmma.cuh"

namespace jax_ep::sm90 {

inline constexpr int kMmaK = 16;  // k of one wgmma
static_assert(kTileK % kMmaK == 0, "a k-block consists of whole MMAs");

// Issues the MMAs of one k-block for a consumer warpgroup. `accumulate` is false for the first
// k-block of a tile. num_k counts from this k-block on. For kRhsGradient the last k-block may have
// fewer than kTileK; the rest of its stage is zeros.
template <typename T, MatmulKind kKind>
__device__ void MultiplyKBlock(float (&accumulators)[kAccumulators], uint32_t stage, int warpgroup,
                               bool accumulate, int num_k) {
  constexpr MajorMode kAMajor = kIsRhsGradient<kKind> ? MajorMode::kMajorMN : MajorMode::kMajorK;
  constexpr MajorMode kBMajor = kHasTransposedB<kKind> ? MajorMode::kMajorK : MajorMode::kMajorMN;
  // Bytes from one MMA's operand to the next: 16 elements of a row if K-major, otherwise 16 rows.
  constexpr int kAStride = kAMajor == MajorMode::kMajorK ? kMmaK * 2 : kMmaK * kSwizzleBytes;
  constexpr int kBStride = kBMajor == MajorMode::kMajorK ? kMmaK * 2 : kMmaK * kSwizzleBytes;
  const uint32_t a = SharedMemoryDescriptor(stage + warpgroup * kAHalfBytes, kSquareBytes);
  const uint32_t b = SharedMemoryDescriptor(stage + kABytes, kSquareBytes);
  const auto multiply = [&](int i) {
    Wgmma<T, kAMajor, kBMajor>(accumulators, a + i * (kAStride >> 4), b + i * (kBStride >> 4),
                               accumulate || i > 0);
  };
  if (!kIsRhsGradient<kKind> || num_k >= kTileK) {
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

// The same for a narrow tile, whose stage has twice as many k.
template <typename T>
__device__ void MultiplyNarrowKBlock(float (&accumulators)[kNarrowAccumulators], uint32_t stage,
                                     bool accumulate) {
  constexpr int kSquareMmas = kTileK / kMmaK;
  const uint32_t a = SharedMemoryDescriptor(stage, kSquareBytes);
  const uint32_t b = SharedMemoryDescriptor(stage + kABytes, kBHalfBytes);
  WgmmaFence();
#pragma unroll
  for (int i = 0; i < kNarrowK / kMmaK; ++i) {
    const int a_offset = i / kSquareMmas * kAHalfBytes + i % kSquareMmas * kMmaK * 2;
    const int b_offset = i * kMmaK * kSwizzleBytes;
    Wgmma128<T>(accumulators, a + (a_offset >> 4), b + (b_offset >> 4), accumulate || i > 0);
  }
  WgmmaCommitGroup();
}

// A consumer warp's positions in the rings, which go through tiles and narrow tiles alike.
struct ConsumerState {
  TileReader tiles;
  PipelineState<kStages> stage;
};

__device__ inline bool IsNarrow(const Tile& tile) { return tile.shared == SharedOperand::kANarrow; }

// Computes `tile` and those after it, until one is narrow where these are not, or the other way
// round. Returns that one, or the empty tile that comes last.
template <typename T, MatmulKind kKind, bool kIsNarrow>
__device__ Tile RunTiles(const MatmulTensorMaps& maps, const MatmulParams& params,
                         const Pipeline& pipeline, Tile tile, ConsumerState& ring) {
  constexpr int kStageK = kIsNarrow ? kNarrowK : kTileK;
  const int warp = WarpUniform(threadIdx.x / 32) - kWarpgroupWarps;  // among the consumers
  const int warpgroup = warp / kWarpgroupWarps;
  Epilogue<T, kKind, kIsNarrow ? 1 : 2> epilogue(params, maps, pipeline.Staging(warp));
  // Lanes 0 and 1 release stages, each to the producer of one block.
  const int lane = threadIdx.x % 32;
  const uint32_t empty_barriers = MapToBlock(pipeline.EmptyBarrier(0), lane % kClusterBlocks);
  const auto consumer_release = [&](int stage) {
    if (lane < kClusterBlocks) {
      MbarrierArriveRemote(empty_barriers + stage * kBarrierBytes);
    }
  };
  TileReader& tiles = ring.tiles;
  PipelineState<kStages>& state = ring.stage;
  bool is_full = false;  // the stage at `state` has been seen full
  float accumulators[kIsNarrow ? kNarrowAccumulators : kAccumulators];
  if constexpr (kHasNarrowTiles<kKind>) {
    // Ends their lives between calls: ptxas would keep unset ones, and spill.
    for (float& value : accumulators) value = 0;
  }
  const auto is_next = [](const Tile& next) {
    return next.num_k > 0 && (!kHasNarrowTiles<kKind> || IsNarrow(next) == kIsNarrow);
  };
  for (Tile next; is_next(tile); tile = next) {
    // Rows past the end of the group are padding; often a warpgroup has no others.
    const bool has_rows = warpgroup * kWarpgroupM < tile.num_m;
    int previous_stage = -1;
    for (int k = 0; k < tile.num_k; k += kStageK) {
      const uint32_t stage = pipeline.Stage(state.index);
      if (has_rows) epilogue.LoadSlice();
      if (!is_full) pipeline.ConsumerWait(state);
      const int num_k = tile.num_k - k;
      const int current_stage = state.index;
      state.Advance();
      if (has_rows) {
        if constexpr (kIsNarrow) {
          MultiplyNarrowKBlock<T>(accumulators, stage, k > 0);
        } else {
          MultiplyKBlock<T, kKind>(accumulators, stage, warpgroup, k > 0, num_k);
        }
        is_full = pipeline.ConsumerTest(state);
        WgmmaWaitGroup<1>();
      } else {
        is_full = false;
      }
      // The MMAs of the previous k-block are complete, so its stage has been read.
      __syncwarp();
      if (previous_stage >= 0) consumer_release(previous_stage);
      // The MMAs just issued keep the tensor cores busy meanwhile.
      if (has_rows) epilogue.RunSlice(k / kStageK);
      previous_stage = current_stage;
    }
    if (has_rows) epilogue.Finish();
    next = tiles.Next();
    WgmmaWaitGroup<0>();
    FenceAccumulators(accumulators);
    __syncwarp();
    consumer_release(previous_stage);
    if (!has_rows) continue;
    const int m = warp * kWarpM;
    const EpilogueCoordinates at = {
        .group = tile.group, .m = tile.m + m, .n = tile.n, .num_m = tile.num_m - m};
    epilogue.Store(params, at, accumulators);
    FenceAccumulators(accumulators);
  }
  epilogue.Finish();
  epilogue.Close();
  return tile;
}

// Called by all consumer warps of a block.
template <typename T, MatmulKind kKind>
__device__ void RunConsumer(const MatmulTensorMaps& maps, const MatmulParams& params,
                            const Pipeline& pipeline) {
  ConsumerState ring = {.tiles = TileReader(pipeline)};
  Tile tile = ring.tiles.Next();
  if constexpr (kHasNarrowTiles<kKind>) {
#pragma unroll 1
    while (tile.num_k > 0) {
      if (IsNarrow(tile)) {
        tile = RunTiles<T, kKind, true>(maps, params, pipeline, tile, ring);
      } else {
        tile = RunTiles<T, kKind, false>(maps, params, pipeline, tile, ring);
      }
    }
  } else {
    RunTiles<T, kKind, false>(maps, params, pipeline, tile, ring);
  }
}

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_CONSUMER_CUH_
