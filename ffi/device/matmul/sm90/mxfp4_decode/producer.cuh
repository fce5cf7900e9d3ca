// The producer warp of the matmul that decodes with MXFP4 weights (sm_90): finds the tiles, and
// loads their rows, weights and scales.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_PRODUCER_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_PRODUCER_CUH_

#include "ffi/device/matmul/group_search.cuh"
#include "ffi/device/matmul/sm90/mxfp4_decode/pipeline.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/barrier.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90::decode {

// Called by one warp of each block. Every block takes each gridDim.x-th tile.
template <typename Shape>
class Producer {
 public:
  __device__ Producer(const MatmulTensorMaps& maps, const MatmulParams& params,
                      const DecodeScales& scales, const Pipeline<Shape>& pipeline)
      : maps_(maps),
        params_(params),
        scales_(scales),
        pipeline_(pipeline),
        groups_(params),
        index_(blockIdx.x) {}

  // Finds the first tile.
  __device__ void Begin() { tile_ = Find(); }

  __device__ void Run() {
    while (tile_.num_k > 0) {
      const Tile tile = tile_;
      const ProfileLoop loop(SpanKind::kLoad, Shape::kRecorders);
      {
        const ProfileWait wait(Shape::kRecorders);
        MbarrierWait(pipeline_.DepositedBarrier(tile_state_.index), tile_state_.parity ^ 1);
      }
#pragma unroll 1
      for (int k = 0; k < tile.num_k; k += Shape::kStageK) LoadStage(tile, k);
      tile_state_.Advance();
      index_ += gridDim.x;
      tile_ = Find();
    }
    pipeline_.ProducerAcquire(state_);
    if (ElectOne()) {
      pipeline_.StoreTile(state_.index, {});
      MbarrierArrive(pipeline_.FullBarrier(state_.index));
    }
  }

 private:
  // Returns the tile of index_, or one without k if there are no more.
  __device__ Tile Find() {
    GroupItem item;
    if (!groups_.Find(index_, &item)) return {};
    const DecodeTiles tiles = groups_.GroupRaster(item);
    const DecodeTiles::Place at = tiles.At(item.index);
    is_zero_ = item.group == params_.groups.num_groups;
    return {.group = is_zero_ ? 0 : item.group,
            .m = item.first_row + at.m,
            .n = at.n_tile * Shape::kColumns,
            .num_m = min(tiles.num_m - at.m, DecodeTiles::kRows),
            .num_k = is_zero_ ? kTileK : params_.shape_k};
  }

  // A result of zeros is one k-block past the end of k, where TMA loads zeros.
  __device__ void LoadStage(const Tile& tile, int k) {
    pipeline_.ProducerAcquire(state_);
    if (ElectOne()) {
      const uint32_t stage = pipeline_.Stage(state_.index);
      const uint32_t full = pipeline_.FullBarrier(state_.index);
      const int from = is_zero_ ? params_.shape_k : k;
      const bool is_narrow = tile.num_m <= DecodeTiles::kRowUnit;
      const int scale_boxes =
          k == 0 ? CeilDivide(Shape::kColumns * scales_.k_blocks, kScalesBoxBytes) : 0;
      if (k == 0) pipeline_.StoreTile(state_.index, tile);
      MbarrierArriveExpectTx(full, Shape::kBoxes * Shape::kBoxBytes +
                                       Shape::kParts * (is_narrow ? kRowsBytes / 2 : kRowsBytes) +
                                       scale_boxes * kScalesBoxBytes);
#pragma unroll
      for (int box = 0; box < Shape::kBoxes; ++box) {
        TmaLoadEvictFirst(
            stage + Shape::kWeightsAt + box * Shape::kBoxBytes, &maps_.b, full,
            {(from + box * kBoxKBlocks * kTileK) / kPerElement, tile.n, 0, tile.group});
      }
      TmaLoad(stage, is_narrow ? &maps_.a_narrow : &maps_.a, full,
              PrefixCoordinates(tile.m + tile.num_m, 0, tile.m, from / kTileK));
      LoadScales(tile, scale_boxes, full);
    }
    __syncwarp();
    state_.Advance();
  }

  // A result of zeros has scales from before the first one, which are zeros.
  __device__ void LoadScales(const Tile& tile, int boxes, uint32_t full) const {
    const uint32_t to = pipeline_.Scales(tile_state_.index);
    const int64_t column = int64_t{tile.group} * params_.shape_n + tile.n;
    const int word = is_zero_ ? -boxes * DecodeScales::kBoxWords
                              : static_cast<int>(column * scales_.k_blocks / 4);
#pragma unroll 1
    for (int box = 0; box < boxes; ++box) {
      TmaLoad(to + box * kScalesBoxBytes, &scales_.map, full,
              {word + box * DecodeScales::kBoxWords, 0, 0, 0});
    }
  }

  static constexpr int kPerElement = 4;  // weights per 16-bit element of the tensor map

  const MatmulTensorMaps& maps_;
  const MatmulParams& params_;
  const DecodeScales& scales_;
  const Pipeline<Shape> pipeline_;
  GroupSearch<MatmulKind::kForwardTransposed, DecodeTiles> groups_;
  int64_t index_;
  Tile tile_ = {};
  bool is_zero_ = false;
  typename Pipeline<Shape>::State state_;
  typename Pipeline<Shape>::TileState tile_state_;
};

}  // namespace jax_ep::sm90::decode

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_PRODUCER_CUH_
