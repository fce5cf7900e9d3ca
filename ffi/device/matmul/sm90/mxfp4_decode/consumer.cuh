// The consumer warps of the matmul that decodes with MXFP4 weights (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_CONSUMER_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_CONSUMER_CUH_

#include "ffi/device/matmul/sm90/mxfp4_decode/pipeline.cuh"
#include "ffi/device/matmul/sm90/mxfp4_decode/product.cuh"

namespace jax_ep::sm90::decode {

// Several warps share 32 columns: each multiplies one k-block of a stage, and leaves its sums to
// the epilogue warps. If the last stage of a tile has fewer k-blocks, the next tile begins with the
// warp that would have had the next one.
template <typename Shape>
class Consumer {
 public:
  __device__ Consumer(const DecodeScales& scales, const Pipeline<Shape>& pipeline)
      : k_blocks_(scales.k_blocks),
        pipeline_(pipeline),
        warp_(WarpUniform(threadIdx.x / 32)),
        first_column_(warp_ % Shape::kColumnWarps * kWarpColumns) {}

  // Called by all consumer warps of a block.
  __device__ void Run() {
    int first_warp = 0;
    for (;;) {
      WaitForTile();
      const Tile tile = pipeline_.LoadTile(state_.index);
      if (tile.num_k == 0) break;
      const ProfileLoop loop(SpanKind::kMultiply, Shape::kRecorders);
      const int k_block = (warp_ / Shape::kColumnWarps - first_warp) & Shape::kParts - 1;
      if (tile.num_m <= DecodeTiles::kRowUnit) {
        MultiplyTile<1>(tile, k_block);
      } else {
        MultiplyTile<2>(tile, k_block);
      }
      first_warp += CeilDivide(tile.num_k, kTileK);
    }
    Deposit({}, [] {});
  }

 private:
  __device__ void WaitForTile() const {
    const ProfileSpan span(SpanKind::kWaitTile, Shape::kRecorders);
    pipeline_.ConsumerWait(state_);
  }

  // Multiplies a tile, whose first stage is full. `k_block`: this warp's of each stage.
  template <int kUnits>
  __device__ __forceinline__ void MultiplyTile(const Tile& tile, int k_block) {
    Product<Shape, kUnits> product(first_column_, pipeline_.Scales(tile_state_.index), k_blocks_,
                                   k_block);
    const int first_k = k_block * kTileK;
    int k = tile.num_k;
#pragma unroll 1
    for (;; k -= Shape::kStageK) {
      if (first_k < k) product.Multiply(pipeline_.Stage(state_.index));
      pipeline_.Arrive(pipeline_.EmptyBarrier(state_.index));
      state_.Advance();
      if (k <= Shape::kStageK) break;
      pipeline_.ConsumerWait(state_);
    }
    Deposit(tile, [&] { product.Deposit(pipeline_.Sums(k_block), first_column_); });
  }

  // Calls store() when the sums of the tile before have been added. The last tile is an empty one.
  template <typename Store>
  __device__ __forceinline__ void Deposit(const Tile& tile, const Store& store) {
    {
      const ProfileSpan span(SpanKind::kWaitBlock, Shape::kRecorders);
      MbarrierWait(pipeline_.AddedBarrier(), parity_ ^ 1);
    }
    parity_ ^= 1;
    store();
    if (threadIdx.x == 0) pipeline_.StoreDeposited(tile);
    MbarrierArrive(pipeline_.DepositedBarrier(tile_state_.index));
    tile_state_.Advance();
  }

  const int k_blocks_;
  const Pipeline<Shape> pipeline_;
  const int warp_;
  const int first_column_;  // the warp's, in a tile
  typename Pipeline<Shape>::State state_;
  typename Pipeline<Shape>::TileState tile_state_;
  uint32_t parity_ = 0;  // the added barrier's
};

}  // namespace jax_ep::sm90::decode

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_CONSUMER_CUH_
