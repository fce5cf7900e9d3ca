// Raster order of the sm_90 matmul: the pairs of tiles in one group's result, one pair per cluster.
// For host and device, so that unit tests can check it.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_SCHEDULE_TILE_PAIRS_H_
#define JAX_EP_DEVICE_MATMUL_SM90_SCHEDULE_TILE_PAIRS_H_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// The operand that both tiles of a pair read. Each block loads half of it and multicasts the half
// to both. kANarrow and those after it are of swapped operands (swapped_tile_pairs.h,
// swapped_wide_tile_pairs.h).
enum class SharedOperand : int32_t {
  kB,        // the tiles have the same columns and different rows; the second may have no rows
  kA,        // the tiles have the same rows and adjacent columns
  kANarrow,  // the same, and the tiles are narrow
  kAWide,    // the same, and the tiles are wide
  kBNarrow,  // the tiles have the same columns and different rows, and are narrow
  kNone      // the tiles share nothing
};

struct PairedTile {
  SharedOperand shared;
  int32_t m;       // first row
  int32_t n_tile;  // first column, in tiles
  int32_t num_m;   // valid rows from m on; may exceed the tile, and may be 0
};

// Pairs of tiles of kTileM rows. Two tiles that follow each other along m are a pair. If their
// number is odd, the last one is paired with that of the next column. In the last column, if there
// is no next one, the two halves of that tile are the pair. So the tiles of every pair share an
// operand.
template <int kTileM>
struct TilePairs {
  static_assert(kTileM % 2 == 0, "a tile may be split between the two blocks");
  static constexpr int kHalfM = kTileM / 2;

  int32_t num_m;    // rows of the result
  int32_t tiles_n;  // tiles along n

  JAX_EP_HOST_DEVICE int64_t Count() const {
    return int64_t{TilesM() / 2} * tiles_n + TilesM() % 2 * CeilDivide(tiles_n, 2);
  }

  // Returns the tile of the given block of a cluster. Pairs go through bands of at most kBandTiles
  // tiles along m. Each band advances by two columns: first the pairs of one column, then those of
  // the other, then the pair that spans both. Clusters that run at the same time then read the same
  // operands.
  JAX_EP_HOST_DEVICE PairedTile At(int64_t index, int block_rank) const {
    constexpr int32_t kBandTiles = 16;
    static_assert(kBandTiles % 2 == 0, "no pair spans two bands");
    const int64_t pairs_of_band = int64_t{kBandTiles / 2} * tiles_n;
    const int32_t band = static_cast<int32_t>(index / pairs_of_band);
    const int32_t first = band * kBandTiles;
    const int32_t height = Min(kBandTiles, TilesM() - first);
    const int32_t pairs_m = height / 2;
    const int32_t pairs_of_two_columns = 2 * pairs_m + height % 2;
    const int32_t within = static_cast<int32_t>(index - band * pairs_of_band);
    const int32_t n_tile = within / pairs_of_two_columns * 2;
    const int32_t pair = within % pairs_of_two_columns;
    const bool has_two_columns = n_tile + 1 < tiles_n;
    if (pair < (has_two_columns ? 2 * pairs_m : pairs_m)) {
      const int32_t m = (first + pair % pairs_m * 2 + block_rank) * kTileM;
      return {SharedOperand::kB, m, n_tile + pair / pairs_m, num_m - m};
    }
    const int32_t m = (first + 2 * pairs_m) * kTileM;
    if (has_two_columns) return {SharedOperand::kA, m, n_tile + block_rank, num_m - m};
    const int32_t half = Min(num_m - m - block_rank * kHalfM, kHalfM);
    return {SharedOperand::kB, m + block_rank * kHalfM, n_tile, Max(half, 0)};
  }

 private:
  JAX_EP_HOST_DEVICE int32_t TilesM() const { return CeilDivide(num_m, kTileM); }
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_SCHEDULE_TILE_PAIRS_H_
