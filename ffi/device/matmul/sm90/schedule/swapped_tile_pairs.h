// Raster order of the sm_90 matmuls with swapped operands: the pairs of tiles in one group's
// result, one pair per cluster. For host and device, so that unit tests can check it.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_SCHEDULE_SWAPPED_TILE_PAIRS_H_
#define JAX_EP_DEVICE_MATMUL_SM90_SCHEDULE_SWAPPED_TILE_PAIRS_H_

#include "ffi/device/common/integers.h"
#include "ffi/device/matmul/sm90/schedule/tile_pairs.h"

namespace jax_ep {

// Tiles of at most kMaxRows rows. A group's rows are cut into as few tiles as that allows, all of
// the same height to kRowUnit rows. MMAs take any multiple of kRowUnit rows, so only the last tile
// multiplies rows that the group does not have, and fewer than kRowUnit of them.
//
// Two tiles of adjacent columns are a pair, and share their rows. In a last odd column two tiles
// that follow each other along m are a pair, or the two halves of one; they share nothing.
//
// A group of at most kNarrowRows rows has narrow tiles. Their pairs are the same, but that a last
// odd column is paired with one that does not exist; with halves_columns, the two halves of a
// tile's columns are a pair: if tiles are few, their halves occupy twice as many SMs.
struct SwappedTilePairs {
  static constexpr int32_t kMaxRows = 256;
  static constexpr int32_t kRowUnit = 8;
  static constexpr int32_t kNarrowRows = 64;

  int32_t num_m;    // rows of the result
  int32_t tiles_n;  // tiles along n
  bool halves_columns = false;

  JAX_EP_HOST_DEVICE int64_t Count() const {
    if (IsNarrow()) return halves_columns ? tiles_n : CeilDivide(tiles_n, 2);
    const int32_t tiles_m = TilesM();
    return int64_t{tiles_n / 2} * tiles_m + tiles_n % 2 * CeilDivide(tiles_m, 2);
  }

  // Returns whether tiles have so many rows that they take longer than most.
  JAX_EP_HOST_DEVICE bool IsTall() const { return num_m > kMaxRows / 4 * 3 * TilesM(); }

  // Returns the tile of the given block of a cluster. Pairs go through bands of at most kBandTiles
  // tiles along m, column by column.
  JAX_EP_HOST_DEVICE PairedTile At(int64_t index, int block_rank) const {
    if (IsNarrow()) {
      const int32_t pair = static_cast<int32_t>(index);
      return {SharedOperand::kANarrow, 0, halves_columns ? pair : 2 * pair + block_rank, num_m};
    }
    constexpr int32_t kBandTiles = 8;
    static_assert(kBandTiles % 2 == 0, "no pair spans two bands");
    const int64_t pairs_of_band =
        int64_t{tiles_n / 2} * kBandTiles + tiles_n % 2 * (kBandTiles / 2);
    const int32_t band = static_cast<int32_t>(index / pairs_of_band);
    const int32_t first = band * kBandTiles;
    const int32_t height = Min(kBandTiles, TilesM() - first);
    const int32_t within = static_cast<int32_t>(index - band * pairs_of_band);
    const int32_t n_tile = within / height * 2;
    const int32_t tile = within % height;
    if (n_tile + 1 < tiles_n) {
      return Between(SharedOperand::kA, FirstRow(first + tile), FirstRow(first + tile + 1),
                     n_tile + block_rank);
    }
    const int32_t m_tile = first + 2 * tile + block_rank;
    if (first + 2 * tile + 1 < TilesM()) {
      return Between(SharedOperand::kNone, FirstRow(m_tile), FirstRow(m_tile + 1), n_tile);
    }
    const int32_t begin = FirstRow(first + 2 * tile);
    const int32_t middle = begin + CeilDivide(num_m - begin, 2 * kRowUnit) * kRowUnit;
    return block_rank == 0 ? Between(SharedOperand::kNone, begin, Min(middle, num_m), n_tile)
                           : Between(SharedOperand::kNone, Min(middle, num_m), num_m, n_tile);
  }

 private:
  JAX_EP_HOST_DEVICE bool IsNarrow() const { return num_m > 0 && num_m <= kNarrowRows; }
  JAX_EP_HOST_DEVICE static PairedTile Between(SharedOperand shared, int32_t begin, int32_t end,
                                               int32_t n_tile) {
    return {shared, begin, n_tile, end - begin};
  }
  JAX_EP_HOST_DEVICE int32_t TilesM() const { return CeilDivide(num_m, kMaxRows); }
  JAX_EP_HOST_DEVICE int32_t FirstRow(int32_t tile) const {
    const int64_t units = CeilDivide(num_m, kRowUnit);
    return Min(static_cast<int32_t>(units * tile / TilesM()) * kRowUnit, num_m);
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_SCHEDULE_SWAPPED_TILE_PAIRS_H_
