// Which pair of tiles a cluster computes next (sm_90).
#ifndef JAX_EP_DEVICE_MATMUL_SM90_TILE_CLAIMS_CUH_
#define JAX_EP_DEVICE_MATMUL_SM90_TILE_CLAIMS_CUH_

#include "ffi/device/common/integers.h"

namespace jax_ep {

inline constexpr int kNumTileCounters = 1 << 16;

// Zero between launches. Launches that may run at the same time have different ones.
struct TileCounter {
  uint32_t num_claimed;
  uint32_t num_finished;  // clusters
};
__device__ static TileCounter tile_counters[kNumTileCounters];

// The first pair is that of the cluster's number. Each later one is the next that no cluster has,
// so that tiles which are neighbours begin at about the same time, whatever those before took: what
// they read of the same matrix is then read from memory once and from the L2 cache afterwards.
// Groups of 512 rows, give or take 20, took 1.4 times as long without, when blocks were not in
// pairs. Results do not depend on who computes what. By one thread of a cluster.
class TileClaims {
 public:
  // Of so many clusters. Without a counter every num_clusters-th pair is the cluster's.
  __device__ TileClaims(int32_t counter, uint32_t cluster, uint32_t num_clusters)
      : counter_(counter < 0 ? nullptr : &tile_counters[counter]),
        num_clusters_(num_clusters),
        index_(cluster) {}

  __device__ int64_t index() const { return index_; }

  __device__ void Next() {
    index_ = counter_ == nullptr ? index_ + num_clusters_
                                 : int64_t{num_clusters_} + atomicAdd(&counter_->num_claimed, 1);
  }

  // After the last. The last cluster leaves zeros: no other will claim.
  __device__ void Finish() {
    if (counter_ == nullptr) return;
    __threadfence();
    if (atomicAdd(&counter_->num_finished, 1) != num_clusters_ - 1) return;
    counter_->num_claimed = 0;
    counter_->num_finished = 0;
  }

 private:
  TileCounter* const counter_;
  const uint32_t num_clusters_;
  int64_t index_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_TILE_CLAIMS_CUH_
