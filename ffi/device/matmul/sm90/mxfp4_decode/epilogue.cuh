// The epilogue warps of the matmul that decodes with MXFP4 weights (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_EPILOGUE_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_EPILOGUE_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/mxfp4_decode/pipeline.cuh"
#include "ffi/device/ptx/element_types.cuh"

namespace jax_ep::sm90::decode {

// Adds the parts' sums of each tile, always in the same order, and stores the results, while the
// consumers multiply the next tile.
template <typename Shape>
class Epilogue {
 public:
  __device__ Epilogue(const MatmulParams& params, const Pipeline<Shape>& pipeline)
      : params_(params), pipeline_(pipeline), warp_(threadIdx.x / 32 - kFirstEpilogueWarp) {}

  __device__ void Run() {
    for (;;) {
      {
        const ProfileSpan span(SpanKind::kWaitTile, Shape::kRecorders);
        MbarrierWait(pipeline_.DepositedBarrier(state_.index), state_.parity);
      }
      const Tile tile = pipeline_.LoadDeposited();
      if (tile.num_k == 0) break;
      const ProfileSpan span(SpanKind::kEpilogue, Shape::kRecorders);
      Add(tile);
      MbarrierArrive(pipeline_.AddedBarrier());
      state_.Advance();
    }
  }

 private:
  // A warp has 64 columns of a row at a time.
  __device__ void Add(const Tile& tile) const {
    constexpr int kRowItems = Shape::kColumns / 64;
    const int items = tile.num_m * kRowItems;
#pragma unroll 1
    for (int item = warp_; item < items; item += kEpilogueWarps) {
      const int row = item / kRowItems;
      const int column = item % kRowItems * 64 + threadIdx.x % 32 * 2;
      float sums[2] = {};
#pragma unroll
      for (int part = 0; part < Shape::kParts; ++part) {
        float some[2];
        LoadSharedPair(pipeline_.Sums(part) + row * Shape::kSumsLine + column * 4, some);
        sums[0] += some[0];
        sums[1] += some[1];
      }
      if (tile.n + column < params_.shape_n) Store(tile.m + row, tile.n + column, sums);
    }
  }

  __device__ void Store(int row, int column, const float (&sums)[2]) const {
    const int64_t at = int64_t{row} * params_.shape_n + column;
    if (params_.out_is_float32) {
      *reinterpret_cast<float2*>(static_cast<float*>(params_.out) + at) = {sums[0], sums[1]};
    } else {
      *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(params_.out) + at) = BFloat16::Pack(sums);
    }
  }

  const MatmulParams& params_;
  const Pipeline<Shape> pipeline_;
  const int warp_;
  typename Pipeline<Shape>::TileState state_;
};

}  // namespace jax_ep::sm90::decode

#endif  // JAX_EP_DEVICE_MATMUL_SM90_MXFP4_DECODE_EPILOGUE_CUH_
