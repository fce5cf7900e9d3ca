// The consumer warpgroups of the FP8 matmul, which multiply, promote and store (sm_90).
//
// The tensor cores add 8-bit products with about 14 bits. So the products of each k-block of 128
// start from zero, and the threads add them to float32 sums, times their scales. A warpgroup
// multiplies 64 x 128 at a time, because products of 64 x 256 and their sums exceed the registers.
// While one warpgroup promotes, the tensor cores run the MMAs of the other.
//
// With Epilogue::kReadsAhead the ends of tiles are short: in the last k-block a warp reads the next
// tile, loads its first scales, and stores the first half. That leaves registers to load scales one
// k-block ahead, otherwise three. Where tiles have many k-blocks, the latter counts.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_FP8_CONSUMER_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_FP8_CONSUMER_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/epilogue/fp8_scales.cuh"
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

// A consumer warp. `sums` and `products` are no members: as such they would be in local memory.
template <typename A, typename B, typename Scales, typename Epilogue>
class Fp8Consumer {
 public:
  __device__ Fp8Consumer(const MatmulTensorMaps& maps, const MatmulParams& params,
                         const Fp8Scales& scales, const Pipeline& pipeline)
      : scales_(scales),
        pipeline_(pipeline),
        warp_(WarpUniform(threadIdx.x / 32) - kWarpgroupWarps),
        empty_barriers_(MapToBlock(pipeline.EmptyBarrier(0), threadIdx.x % 32 % kClusterBlocks)),
        epilogue_(params, scales, maps, pipeline.Staging(warp_)),
        tiles_(pipeline) {}

  __device__ void Run() {
    Sums sums = {};
    ReadTile();
    while (tile_.num_k > 0) {
      // Results are stored between multiplications: a span of theirs would spill registers.
      const ProfileLoop loop(SpanKind::kMultiply, SharedLayout::kRecorders);
      // Rows past the end of the group are padding; often a warpgroup has no others.
      if (Warpgroup() * kWarpgroupM >= tile_.num_m) {
        SkipTile();
      } else if constexpr (Epilogue::kReadsAhead) {
        MultiplyTileReadingAhead(sums);
      } else {
        MultiplyTileUnrolled(sums);
      }
    }
    epilogue_.StoreSecond(sums);
    epilogue_.Close();
  }

 private:
  using Sums = float[kHalves][kHalfAccumulators];

  __device__ void SkipTile() {
    const int num_k_blocks = NumKBlocks();
    for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
      pipeline_.ConsumerWait(state_);
      Release(state_.index);
      state_.Advance();
    }
    ReadTile();
  }

  // Reads the next tile in the last k-block, and loads scales one k-block ahead.
  __device__ void MultiplyTileReadingAhead(Sums& sums) {
    float products[kHalfAccumulators];
    const int num_k_blocks = NumKBlocks();
    KBlockFactors factors;
    for (int k_block = 0; k_block < num_k_blocks; ++k_block) {
      const bool is_last = k_block + 1 == num_k_blocks;
      const uint32_t stage = pipeline_.Stage(state_.index);
      pipeline_.ConsumerWait(state_);
      MultiplyHalf<A, B>(products, stage, Warpgroup(), 0);
      if (k_block == 0) {
        epilogue_.StoreSecond(sums);
        factors = Scales::Select(quad_.Factors(), 0);
      }
      if (is_last) {
        epilogue_.Load(Place());
        ReadTile();
      }
      WaitFor(products);
      Promote<Scales>(sums[0], products, factors.by_row[0]);
      const float2 by_row = factors.by_row[1];
      MultiplyHalf<A, B>(products, stage, Warpgroup(), 1);
      if (is_last) {
        epilogue_.StoreFirst(sums[0]);
      } else {
        factors = Scales::Select(quad_.Factors(), k_block + 1);
        if (k_block % kQuad == kQuad - 2) quad_ = LoadScales(k_block + 2);
      }
      WaitFor(products);
      Release(state_.index);
      state_.Advance();
      Promote<Scales>(sums[1], products, by_row);
    }
  }

  // Loads the scales of four k-blocks in the first of the four before, and waits for them in the
  // fourth. In a loop that is not unrolled, ptxas moves them to the variable in use by an
  // instruction whose predicate is false until then, but which waits in every k-block. A use that
  // may follow either of two loads waits for both. So a tile's first scales are used before the
  // loop.
  __device__ void MultiplyTileUnrolled(Sums& sums) {
    float products[kHalfAccumulators];
    const int num_k_blocks = NumKBlocks();
    KBlockFactors quad = quad_.Factors();
    KBlockFactors factors = Scales::Select(quad, 0);
    bool is_full = false;  // the next stage was seen to be full
    for (int first = 0; first < num_k_blocks; first += kQuad) {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        if (i > 0 && first + i == num_k_blocks) break;
        const int index = state_.index;
        const uint32_t stage = pipeline_.Stage(index);
        if (!is_full) pipeline_.ConsumerWait(state_);
        MultiplyHalf<A, B>(products, stage, Warpgroup(), 0);
        if (i == 0) {
          quad_ = LoadScales(first + kQuad);
          if (first == 0) epilogue_.StoreSecond(sums);
        }
        WaitFor(products);
        Promote<Scales>(sums[0], products, factors.by_row[0]);
        const float2 by_row = factors.by_row[1];
        MultiplyHalf<A, B>(products, stage, Warpgroup(), 1);
        if (i == kQuad - 1) quad = quad_.Factors();
        factors = Scales::Select(quad, i + 1);
        // Tests the next stage during the MMAs, which hides the latency of an mbarrier. A stage
        // seen to be full stays so until this warp releases it.
        state_.Advance();
        is_full = pipeline_.ConsumerTest(state_);
        WaitFor(products);
        Release(index);
        Promote<Scales>(sums[1], products, by_row);
      }
    }
    epilogue_.Load(Place());
    ReadTile();
    epilogue_.StoreFirst(sums[0]);
  }

  __device__ void ReadTile() {
    tile_ = tiles_.Next();
    quad_ = LoadScales(0);
  }

  // A load whose result is used at once stops the warp for longer than the MMAs take.
  __device__ KBlockScales LoadScales(int k_block) const {
    if constexpr (Scales::kContractsRows) k_block += tile_.k / kFp8Block;
    return Scales::Load(scales_, Place(), k_block);
  }

  __device__ static void WaitFor(float (&products)[kHalfAccumulators]) {
    WgmmaWaitGroup<0>();
    FenceAccumulators(products);
  }

  // Lanes 0 and 1 release a stage, each to the producer of one block.
  __device__ void Release(int stage) const {
    __syncwarp();
    if (threadIdx.x % 32 < kClusterBlocks) {
      MbarrierArriveRemote(empty_barriers_ + stage * kBarrierBytes);
    }
  }

  __device__ EpilogueCoordinates Place() const {
    const int m = warp_ * kWarpM;
    // A tile of zeros has a k past the end of the operands.
    const int group = !Scales::kContractsRows && tile_.k > 0 ? -1 : tile_.group;
    return {.group = group, .m = tile_.m + m, .n = tile_.n, .num_m = tile_.num_m - m};
  }

  __device__ int Warpgroup() const { return warp_ / kWarpgroupWarps; }
  // k counts pairs of values, but rows in weight gradients.
  __device__ int NumKBlocks() const {
    return CeilDivide(tile_.num_k, Scales::kContractsRows ? kFp8Block : kTileK);
  }

  const Fp8Scales& scales_;
  const Pipeline& pipeline_;
  const int warp_;  // among the consumers
  const uint32_t empty_barriers_;
  Epilogue epilogue_;
  TileReader tiles_;
  PipelineState<kStages> state_;
  Tile tile_;
  KBlockScales quad_;  // this lane's part of the scales of four k-blocks
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MAINLOOP_FP8_CONSUMER_CUH_
