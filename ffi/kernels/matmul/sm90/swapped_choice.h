// How the launch chooses among the tiles of matmuls with swapped operands (sm_90): by static
// shapes, as group sizes are known on the device only.
#ifndef JAX_EP_KERNELS_MATMUL_SM90_SWAPPED_CHOICE_H_
#define JAX_EP_KERNELS_MATMUL_SM90_SWAPPED_CHOICE_H_

#include <cstdint>

#include "ffi/device/matmul/sm90/schedule/swapped_wide_tile_pairs.h"

namespace jax_ep {

struct SwappedCall {
  int64_t num_groups;  // all of a stack's, most of which have no rows
  int64_t num_rows;    // of all groups, at most
  int64_t tiles_n;     // tiles along n
  int64_t clusters;    // at least 1

  // Returns whether all tiles run at once, and even their halves would.
  bool HasFewTiles() const { return num_groups * tiles_n <= clusters; }

  // Returns whether no group has more rows than narrow tiles, if all have the same number. That
  // holds for most calls that decode.
  bool HasFewRows() const { return num_rows <= num_groups * SwappedTilePairs::kNarrowRows; }

  // Returns whether the kernel with SwappedWideTilePairs is faster. A wide tile takes twice as long
  // as another, so it must not add waves. An H100's memory, with a bus of 5120 bits, is no faster
  // than other tiles read it.
  bool TakesWidePairs(int memory_bus_bits) const {
    constexpr int kH100BusBits = 5 * 1024;
    if (HasFewRows()) return false;
    return HasFewTiles() || (memory_bus_bits > kH100BusBits && 2 * Waves(4) <= Waves(2));
  }

  // Returns whether a call has few pairs of so many tiles, see RunScheduler. With many waves of
  // tiles the last one matters little. With few rows per group reading memory bounds all tiles
  // alike.
  bool HasFewPairs(int64_t tiles, int64_t num_sms) const {
    constexpr int64_t kFewWaves = 16;
    return !HasFewRows() && tiles <= kFewWaves * num_sms;
  }

 private:
  int64_t Waves(int64_t tiles_per_pair) const {
    return CeilDivide(num_groups * CeilDivide(tiles_n, tiles_per_pair), clusters);
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_KERNELS_MATMUL_SM90_SWAPPED_CHOICE_H_
