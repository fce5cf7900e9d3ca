// The producer warp of a block, which fills the ring of operand stages (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_LOAD_PRODUCER_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_LOAD_PRODUCER_CUH_

#include "ffi/device/matmul/sm90/load/operand_loader.cuh"
#include "ffi/device/matmul/sm90/pipeline.cuh"
#include "ffi/device/ptx/barrier.cuh"
#include "ffi/device/ptx/mbarrier.cuh"

namespace jax_ep::sm90 {

// Called by one warp of each block. One of its threads issues the copies.
template <typename Loader>
__device__ void RunProducer(const Pipeline& pipeline, const Loader& loader) {
  PipelineState<kStages> state;
  TileReader tiles(pipeline);
  const bool requests_tiles = loader.block_rank == 0;  // for both blocks
  for (Tile tile = tiles.Next(); tile.num_k > 0; tile = tiles.Next()) {
    // A loop for each way to load. Branches slow it down, and so do values for which uniform
    // registers do not suffice. With few rows per tile the tensor cores wait for this warp.
    loader.SelectLoad(tile, [&](int stage_k, const auto& load_stage) {
      // Requests the next pair as late as possible: a pair that waits here would start after its
      // neighbors, which read the same operands.
      const int request_at = max((tile.num_k - 1) / stage_k - kStages, 0) * stage_k;
      const ProfileLoop loop(SpanKind::kLoad, SharedLayout::kRecorders);
#pragma unroll 1
      for (int k = 0; k < tile.num_k; k += stage_k) {
        pipeline.ProducerAcquire(state);
        if (ElectOne()) {
          load_stage(k, pipeline.Stage(state.index), pipeline.FullBarrier(state.index));
          if (requests_tiles && k == request_at) MbarrierArrive(pipeline.TileRequestBarrier());
        }
        __syncwarp();
        state.Advance();
      }
    });
  }
  // The other block may still release stages here.
  for (int i = 0; i < kStages; ++i, state.Advance()) pipeline.ProducerAcquire(state);
}

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_LOAD_PRODUCER_CUH_
