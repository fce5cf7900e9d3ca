// Which pairs of tiles a group's result has, and which tile of a pair is whose (sm_90). On both
// sides, so that the host can check it.
#ifndef JAX_EP_DEVICE_MATMUL_SM90_TILE_PAIRS_H_
#define JAX_EP_DEVICE_MATMUL_SM90_TILE_PAIRS_H_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// The operand that the two tiles of a pair have in common.
enum class Shared : int32_t {
  kRight,  // they have the same columns, and other rows; the second may have none
  kLeft    // the same rows, and other columns
};

struct PairedTile {
  Shared shared;
  int32_t m;      // first row
  int32_t n;      // first column, in tiles
  int32_t num_m;  // rows from there to the end of the result, or of what is the tile's; may be none
};

// Tiles of kTileM rows. Two that follow each other along m are a pair, and if their number is odd
// the last with that of the next column; where there is none, its halves are. So there is no pair
// that shares nothing.
template <int kTileM>
struct TilePairs {
  static constexpr int kHalfM = kTileM / 2;

  int32_t num_m;    // rows of the result
  int32_t tiles_n;  // columns, in tiles

  JAX_EP_HOST_DEVICE int64_t Count() const {
    return int64_t{TilesM() / 2} * tiles_n + TilesM() % 2 * CeilDivide(tiles_n, 2);
  }

  // The tile of block `rank` of a cluster. Bands of at most kBand tiles along m, each from n = 0 to
  // its end, in steps of two columns: pairs of the first, of the second, of both. Blocks that run
  // at the same time then read the same operands.
  JAX_EP_HOST_DEVICE PairedTile Place(int64_t index, int rank) const {
    constexpr int32_t kBand = 16;
    const int64_t pairs_of_band = int64_t{kBand / 2} * tiles_n;
    const int32_t band = static_cast<int32_t>(index / pairs_of_band);
    const int32_t first = band * kBand;
    const int32_t height = Min(kBand, TilesM() - first);
    const int32_t pairs_m = height / 2;
    const int32_t of_two_columns = 2 * pairs_m + height % 2;
    const int32_t within = static_cast<int32_t>(index - band * pairs_of_band);
    const int32_t n = within / of_two_columns * 2;
    const int32_t at = within % of_two_columns;
    const bool has_two = n + 1 < tiles_n;
    if (at < (has_two ? 2 * pairs_m : pairs_m)) {
      const int32_t m = (first + at % pairs_m * 2 + rank) * kTileM;
      return {Shared::kRight, m, n + at / pairs_m, num_m - m};
    }
    const int32_t m = (first + 2 * pairs_m) * kTileM;
    if (has_two) return {Shared::kLeft, m, n + rank, num_m - m};
    const int32_t half = Min(num_m - m - rank * kHalfM, kHalfM);
    return {Shared::kRight, m + rank * kHalfM, n, Max(half, 0)};
  }

 private:
  JAX_EP_HOST_DEVICE int32_t TilesM() const { return CeilDivide(num_m, kTileM); }
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_SM90_TILE_PAIRS_H_
