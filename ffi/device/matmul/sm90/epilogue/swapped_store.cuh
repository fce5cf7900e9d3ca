// Store epilogue of the matmuls with swapped operands (sm_90), in 16 bits or in float32.
//
// A warp has the accumulators of 256 rows x 16 columns, except of wide tiles: accumulators[4 * j +
// 2 * h + i] of lane l is row 8 * j + 2 * (l % 4) + i, column 8 * h + l / 4, or column h of a pair
// of neighbors. epilogue.cuh says when the functions are called.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_SWAPPED_STORE_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_SWAPPED_STORE_CUH_

#include "ffi/device/matmul/params.h"
#include "ffi/device/matmul/sm90/epilogue/swapped_staging.cuh"
#include "ffi/device/matmul/sm90/tensor_maps.h"
#include "ffi/device/ptx/element_types.cuh"
#include "ffi/device/ptx/mma.cuh"
#include "ffi/device/ptx/tma.cuh"

namespace jax_ep::sm90 {

// `Staging`: SwappedStaging, or ColumnPairStaging for the pairs.
template <typename T, typename Staging = SwappedStaging>
class SwappedStoreEpilogue {
 public:
  __device__ SwappedStoreEpilogue(const MatmulParams& /*params*/, const MatmulTensorMaps& maps,
                                  const Pipeline& pipeline, int warp)
      : map_(&maps.out),
        staging_(pipeline, warp),
        own_staging_(pipeline.Staging(warp)),
        warp_(warp) {}

  __device__ void BeginTile(const Tile& /*tile*/) const {}

  // Called with the tile's place. The tile has the columns of both warpgroups or of the first one.
  // kRows: see SwappedActivationEpilogue; the rows past them are cheap.
  template <int kRows = kSwappedRows>
  __device__ void Store(const MatmulParams& params, const EpilogueCoordinates& at,
                        int num_warpgroups, const float (&accumulators)[kAccumulators]) {
    if (params.out_is_float32) {
      if constexpr (Staging::kHasColumnPairs) {
        staging_.StoreFloat32(params, at, accumulators);
      } else {
        if (warp_ / kWarpgroupWarps < num_warpgroups) StoreFloat32(at, accumulators);
      }
      return;
    }
    at_ = at;
    at_.m += warp_ * kWarpM;
    at_.num_m -= warp_ * kWarpM;
    num_boxes_ = num_warpgroups;
    uint32_t words[kStagingWords];
    Pack(accumulators, 0, words);
    if (at.second_half_columns > 0) {
      staging_.FillRows(words);
    } else {
      staging_.Fill(words, warp_ / kWarpgroupWarps < num_warpgroups);
    }
    Pack(accumulators, 1, kept_);
    step_ = 0;
    num_steps_ = HasSecondHalf(at) ? 6 : 3;
  }

  __device__ void LoadSlice(int /*k_block*/) const {}

  // A box has left the staging buffer about three k-blocks after it is stored.
  __device__ void RunSlice(int k_block) {
    // The k-blocks of the steps.
    constexpr uint32_t kSteps = 1 << 0 | 1 << 2 | 1 << 5 | 1 << 6 | 1 << 8 | 1 << 11;
    if (k_block <= 11 && (kSteps >> k_block & 1) != 0) Step();
  }

  __device__ void LoadAndRunSlice(int k_block) { RunSlice(k_block); }

  __device__ void Finish() {
#pragma unroll 1
    while (step_ < num_steps_) Step();
    num_steps_ = 0;  // tells the compiler that kept_ needs no registers from here on
  }

  __device__ void Close() { EpilogueStaging<>::WaitUntilComplete(); }

 private:
  __device__ static void Pack(const float (&accumulators)[kAccumulators], int half,
                              uint32_t (&words)[kStagingWords]) {
    if constexpr (Staging::kHasColumnPairs) {
      Staging::template PackHalf<T>(accumulators, half, words);
    } else {
      PackHalf<T>(accumulators, half, words);
    }
  }

  // The steps of the first half of the rows are publish, store, end the round; those of the second
  // half are fill and publish, store, end the round.
  __device__ void Step() {
    if (step_ >= num_steps_) return;
    if (step_ == 0) {
      staging_.Publish();
    } else if (step_ == 3) {
      if (at_.second_half_columns > 0) {
        staging_.FillRows(kept_);
      } else {
        staging_.Fill(kept_);
      }
      staging_.Publish();
      BeginSecondHalf(&at_);
    } else if (step_ == 1 || step_ == 4) {
      staging_.WaitUntilStaged();
      if (at_.num_m > 0) staging_.Rows().template Store<2>(map_, PrefixBox(at_), num_boxes_);
    } else {
      staging_.EndRound();
    }
    ++step_;
  }

  // Without other warps: each stages 16 columns of 64 rows, lines of 64 bytes with TMA's 64-byte
  // swizzle.
  __device__ void StoreFloat32(EpilogueCoordinates at,
                               const float (&accumulators)[kAccumulators]) const {
    constexpr int kRows = kSwappedFloat32Rows;
    constexpr int kLineBytes = kWarpM * 4;
    const int lane = threadIdx.x % 32;
    at.n += warp_ * kWarpM;
#pragma unroll
    for (int first = 0; first < kSwappedRows; first += kRows) {
      if (at.num_m <= 0) return;
      EpilogueStaging<>::WaitUntilRead();
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = 8 * j + lane % 4 * 2 + i % 2;
          const int vector = (2 * (i / 2) + lane / 16) ^ row / 2 % 4;
          StoreShared(own_staging_ + row * kLineBytes + vector * 16 + lane / 4 % 4 * 4,
                      accumulators[first / 2 + 4 * j + i]);
        }
      }
      FenceProxyAsyncShared();
      __syncwarp();
      if (ElectOne()) {
        TmaStore(map_, own_staging_, PrefixBox(at));
        BulkCommitGroup();
      }
      __syncwarp();
      at.m += kRows;
      at.num_m -= kRows;
    }
  }

  const void* const map_;
  Staging staging_;
  const uint32_t own_staging_;
  const int warp_;
  int step_ = 0;
  int num_steps_ = 0;
  int num_boxes_ = kStagingBoxes;
  EpilogueCoordinates at_ = {};
  uint32_t kept_[kStagingWords] = {};  // the second half of the tile
};

}  // namespace jax_ep::sm90

#endif  // JAX_EP_DEVICE_MATMUL_SM90_EPILOGUE_SWAPPED_STORE_CUH_
