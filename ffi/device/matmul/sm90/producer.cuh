// Fills the ring of stages (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_PRODUCER_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_PRODUCER_CUH_

#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/ptx/barrier.cuh"
#include "ffi/device/ptx/mbarrier.cuh"

namespace jax_ep::sm90 {

// By one warp of each block, of which one thread copies. A source has
//   rank                         the block's number in its cluster;
//   Await(tile)                  returns once the tile's rows of the left operand may be read;
//   Copy(tile, k, stage, full)   makes the barrier expect the bytes of both operands of the step
//                                that begins at tile.k + k, and has this block's part copied.
template <int kTileK, typename Pipeline, typename Source>
__device__ void Produce(const Pipeline& pipeline, const Source& source) {
  Position<Pipeline::kStages> at;
  TileReader<Pipeline> tiles(pipeline);
  const bool wants = source.rank == 0;  // the next pair, for both blocks
  for (Tile tile = tiles.Next(); tile.num_k > 0; tile = tiles.Next()) {
    source.Await(tile);
    // Claimed as late as it can be: a pair that waits would begin after its neighbours.
    const int want_at = max((tile.num_k - 1) / kTileK - Pipeline::kStages, 0) * kTileK;
#pragma unroll 1
    for (int k = 0; k < tile.num_k; k += kTileK) {
      // Its readers are instructions that have ended.
      MbarrierWait(pipeline.Empty(at.index), at.parity ^ 1);
      if (ElectOne()) {
        source.Copy(tile, k, pipeline.Stage(at.index), pipeline.Full(at.index));
        if (wants && k == want_at) Arrive(pipeline.TileWanted());
      }
      __syncwarp();
      at.Advance();
    }
  }
}

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_PRODUCER_CUH_
