// Which tile a block computes next (sm_90).
#ifndef JAX_EP_DEVICE_TILE_CLAIMS_CUH_
#define JAX_EP_DEVICE_TILE_CLAIMS_CUH_

#include "ffi/device/integers.h"

namespace jax_ep {

inline constexpr int kNumTileCounters = 1 << 16;

// Zero between launches. Launches that may run at the same time have different ones.
struct TileCounter {
  uint32_t num_claimed;
  uint32_t num_finished;  // blocks
};
__device__ static TileCounter tile_counters[kNumTileCounters];

// The first tile is that of the block's number. Each later one is the next that no block has, so
// that tiles which are neighbours begin at about the same time, whatever those before took: what
// they read of the same matrix is then read from memory once and from the L2 cache afterwards.
// Groups of 512 rows, give or take 20, take 1.4 times as long without. Results do not depend on who
// computes what. By one thread of a block.
class TileClaims {
 public:
  // Without a counter every gridDim.x-th tile is the block's.
  __device__ explicit TileClaims(int32_t counter)
      : counter_(counter < 0 ? nullptr : &tile_counters[counter]), index_(blockIdx.x) {}

  __device__ int64_t index() const { return index_; }

  __device__ void Next() {
    index_ = counter_ == nullptr ? index_ + gridDim.x
                                 : int64_t{gridDim.x} + atomicAdd(&counter_->num_claimed, 1);
  }

  // After the last. The last block leaves zeros: no other will claim.
  __device__ void Finish() {
    if (counter_ == nullptr) return;
    __threadfence();
    if (atomicAdd(&counter_->num_finished, 1) != gridDim.x - 1) return;
    counter_->num_claimed = 0;
    counter_->num_finished = 0;
  }

 private:
  TileCounter* const counter_;
  int64_t index_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TILE_CLAIMS_CUH_
