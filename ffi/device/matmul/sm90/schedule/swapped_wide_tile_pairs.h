// Raster order of the sm_90 matmuls with swapped operands for calls that may have groups of about
// 100 rows. For host and device, so that unit tests can check it.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_SCHEDULE_SWAPPED_WIDE_TILE_PAIRS_H_
#define JAX_EP_DEVICE_MATMUL_SM90_SCHEDULE_SWAPPED_WIDE_TILE_PAIRS_H_

#include "ffi/device/matmul/sm90/schedule/swapped_tile_pairs.h"

namespace jax_ep {

// The pairs of SwappedTilePairs, except those of groups of more than kNarrowRows and at most
// kWideRows rows. These have wide tiles: twice as many columns, in two halves that are tiles along
// n. Both halves of both tiles of a pair share their rows. The last ones may not exist.
//
// With halves_rows the two halves of a tile's rows are a pair instead, also of up to kMaxRows
// rows. If tiles are few, their halves occupy twice as many SMs. Halves that are narrow share their
// columns.
struct SwappedWideTilePairs : SwappedTilePairs {
  static constexpr int32_t kWideRows = 2 * kNarrowRows;

  bool halves_rows = false;

  JAX_EP_HOST_DEVICE int64_t Count() const {
    if (HasHalves()) return tiles_n;
    return IsWide() ? CeilDivide(tiles_n, 4) : SwappedTilePairs::Count();
  }

  // Returns the tile of the given block of a cluster.
  JAX_EP_HOST_DEVICE PairedTile At(int64_t index, int block_rank) const {
    const int32_t pair = static_cast<int32_t>(index);
    if (HasHalves()) {
      const SharedOperand shared = IsWide() ? SharedOperand::kBNarrow : SharedOperand::kNone;
      const int32_t middle = CeilDivide(num_m, 2 * kRowUnit) * kRowUnit;
      return block_rank == 0 ? PairedTile{shared, 0, pair, middle}
                             : PairedTile{shared, middle, pair, num_m - middle};
    }
    if (!IsWide()) return SwappedTilePairs::At(index, block_rank);
    return {SharedOperand::kAWide, 0, 4 * pair + 2 * block_rank, num_m};
  }

 private:
  JAX_EP_HOST_DEVICE bool IsWide() const { return num_m > kNarrowRows && num_m <= kWideRows; }
  JAX_EP_HOST_DEVICE bool HasHalves() const {
    return halves_rows && num_m > kNarrowRows && num_m <= kMaxRows;
  }
};

template <typename Raster>
inline constexpr bool kHasWideTiles = requires(Raster raster) { raster.halves_rows; };

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_SCHEDULE_SWAPPED_WIDE_TILE_PAIRS_H_
