#include <algorithm>
#include <cstdint>
#include <vector>

#include "ffi/device/matmul/sm90/schedule/swapped_wide_tile_pairs.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

using Pairs = SwappedTilePairs;
constexpr int32_t kMaxRows = Pairs::kMaxRows;
constexpr int32_t kUnit = Pairs::kRowUnit;
constexpr int32_t kBandTiles = 8;

// Two tiles that follow each other have more rows than fit one.
bool AreHalves(const PairedTile (&tiles)[2]) {
  return tiles[0].shared == SharedOperand::kNone && tiles[0].num_m + tiles[1].num_m <= kMaxRows;
}

// Checks the properties of a pair that the kernel relies on.
void CheckPair(const Pairs& pairs, const PairedTile (&tiles)[2]) {
  CHECK(tiles[0].shared == tiles[1].shared);
  if (tiles[0].shared == SharedOperand::kA) {
    CHECK(tiles[0].m == tiles[1].m && tiles[0].num_m == tiles[1].num_m);
    CHECK(tiles[0].n_tile + 1 == tiles[1].n_tile);
  } else {
    CHECK(tiles[0].shared == SharedOperand::kNone);
    CHECK(tiles[0].n_tile == tiles[1].n_tile);
    CHECK(tiles[0].m + tiles[0].num_m == tiles[1].m);
  }
  for (const PairedTile& tile : tiles) {
    CHECK(0 <= tile.n_tile && tile.n_tile < pairs.tiles_n);
    CHECK(0 <= tile.m && tile.m % kUnit == 0);
    // More rows than those of narrow tiles, so that even halves have some.
    CHECK(0 < tile.num_m && tile.num_m <= kMaxRows);
    CHECK(tile.num_m % kUnit == 0 || tile.m + tile.num_m == pairs.num_m);
    CHECK(tile.m + tile.num_m <= pairs.num_m);
  }
}

// Checks that all tiles have the same height to a unit. The end of the rows may cut the last one.
void CheckHeights(const Pairs& pairs, const std::vector<PairedTile>& tiles) {
  int32_t least = kMaxRows;
  int32_t most = 0;
  for (const PairedTile& tile : tiles) {
    const bool is_last = tile.m + tile.num_m == pairs.num_m;
    const int32_t height = CeilDivide(tile.num_m, kUnit) * kUnit;
    CHECK(is_last || height == tile.num_m);
    least = std::min(least, height);
    most = std::max(most, height);
  }
  CHECK(tiles.empty() || most - least <= kUnit);
}

// Every row of every column is computed once, in as few tiles as possible.
void TestAllOnce() {
  for (int32_t rows = Pairs::kNarrowRows + 1; rows < 6000; rows += rows < 700 ? 1 : 61) {
    const int32_t tiles_m = CeilDivide(rows, kMaxRows);
    for (int32_t tiles_n = 1; tiles_n <= 9; ++tiles_n) {
      for (bool halves_columns : {false, true}) {
        const Pairs pairs = {rows, tiles_n, halves_columns};
        std::vector<int> times(static_cast<size_t>(rows) * tiles_n);
        std::vector<PairedTile> whole;
        int32_t split = 0;
        for (int64_t i = 0; i < pairs.Count(); ++i) {
          const PairedTile tiles[2] = {pairs.At(i, 0), pairs.At(i, 1)};
          CheckPair(pairs, tiles);
          const bool are_halves = AreHalves(tiles);
          split += are_halves;
          for (const PairedTile& tile : tiles) {
            if (!are_halves) whole.push_back(tile);
            for (int32_t row = tile.m; row < tile.m + tile.num_m; ++row) {
              ++times.at(static_cast<size_t>(row) * tiles_n + tile.n_tile);
            }
          }
          if (are_halves) CheckHeights(pairs, {tiles[0], tiles[1]});
        }
        CHECK(std::all_of(times.begin(), times.end(), [](int count) { return count == 1; }));
        // Only a last odd tile of a last odd column has no other one to be a pair with.
        CHECK(split == tiles_m % 2 * (tiles_n % 2));
        CHECK(static_cast<int32_t>(whole.size()) + split == tiles_m * tiles_n);
        CheckHeights(pairs, whole);
      }
    }
  }
}

// Consecutive pairs share operands: bands of 8 tiles follow one another, a band goes through its
// columns two at a time, and no pair spans two bands.
void TestOrder() {
  constexpr int32_t kBandM = kBandTiles * kMaxRows;
  for (int32_t tiles_m : {8, 40, 43}) {
    for (int32_t tiles_n : {1, 2, 12, 13}) {
      const Pairs pairs = {tiles_m * kMaxRows, tiles_n};
      PairedTile last = pairs.At(0, 0);
      for (int64_t i = 0; i < pairs.Count(); ++i) {
        const PairedTile first = pairs.At(i, 0);
        CHECK(pairs.At(i, 1).m / kBandM == first.m / kBandM);
        if (first.m / kBandM == last.m / kBandM) {
          CHECK(first.n_tile == last.n_tile ? i == 0 || first.m > last.m
                                            : first.n_tile == last.n_tile + 2);
        } else {
          CHECK(first.m / kBandM == last.m / kBandM + 1 && first.n_tile == 0);
        }
        last = first;
      }
    }
  }
}

// A result of up to 64 rows has narrow tiles. A pair has two columns of tiles, the last of which
// may lie past the end, or the halves of one.
void TestNarrow() {
  for (int32_t rows = 1; rows <= Pairs::kNarrowRows; ++rows) {
    for (int32_t tiles_n = 1; tiles_n <= 9; ++tiles_n) {
      for (bool halves : {false, true}) {
        const Pairs pairs = {rows, tiles_n, halves};
        CHECK(pairs.Count() == (halves ? tiles_n : CeilDivide(tiles_n, 2)));
        for (int32_t i = 0; i < pairs.Count(); ++i) {
          for (int rank = 0; rank < 2; ++rank) {
            const PairedTile tile = pairs.At(i, rank);
            CHECK(tile.shared == SharedOperand::kANarrow);
            CHECK(tile.m == 0 && tile.num_m == rows);
            CHECK(tile.n_tile == (halves ? i : 2 * i + rank));
          }
        }
      }
    }
  }
}

// Groups of 65 to 128 rows have wide tiles, two of four columns of tiles, the last of which may lie
// past the end. With halves, those of 65 to 256 rows have pairs of these, which share their columns
// if they are narrow. All others have the pairs of SwappedTilePairs.
void TestWide() {
  constexpr int32_t kWideRows = SwappedWideTilePairs::kWideRows;
  for (int32_t rows = 0; rows <= kMaxRows + 50; ++rows) {
    for (int32_t tiles_n = 0; tiles_n <= 9; ++tiles_n) {
      for (int options = 0; options < 4; ++options) {
        const bool halves = options % 2 != 0;
        const bool halves_columns = options / 2 != 0;
        const SwappedWideTilePairs pairs = {{rows, tiles_n, halves_columns}, halves};
        const Pairs others = {rows, tiles_n, halves_columns};
        const bool is_wide = rows > Pairs::kNarrowRows && rows <= (halves ? kMaxRows : kWideRows);
        CHECK(pairs.Count() == (!is_wide ? others.Count()
                                : halves ? tiles_n
                                         : CeilDivide(tiles_n, 4)));
        for (int32_t i = 0; i < pairs.Count(); ++i) {
          const PairedTile tiles[2] = {pairs.At(i, 0), pairs.At(i, 1)};
          for (int rank = 0; rank < 2; ++rank) {
            const PairedTile& tile = tiles[rank];
            if (!is_wide) {
              const PairedTile other = others.At(i, rank);
              CHECK(tile.shared == other.shared && tile.n_tile == other.n_tile);
              CHECK(tile.m == other.m && tile.num_m == other.num_m);
            } else if (!halves) {
              CHECK(tile.shared == SharedOperand::kAWide && tile.n_tile == 4 * i + 2 * rank);
              CHECK(tile.m == 0 && tile.num_m == rows);
            } else {
              CHECK(tile.shared ==
                    (rows <= kWideRows ? SharedOperand::kBNarrow : SharedOperand::kNone));
              CHECK(tile.n_tile == i && tile.m % kUnit == 0);
              CHECK(0 < tile.num_m &&
                    tile.num_m <= (rows <= kWideRows ? Pairs::kNarrowRows : kMaxRows / 2));
            }
          }
          if (!is_wide || !halves) continue;
          CHECK(tiles[0].m == 0 && tiles[1].m == tiles[0].num_m);
          CHECK(tiles[0].num_m + tiles[1].num_m == rows);
        }
      }
    }
  }
}

void TestEmpty() {
  for (bool halves : {false, true}) {
    for (int32_t tiles_n : {0, 1, 2, 9}) CHECK((Pairs{0, tiles_n, halves}.Count() == 0));
    for (int32_t rows : {1, 64, 65, 300}) CHECK((Pairs{rows, 0, halves}.Count() == 0));
  }
}

// The most rows and columns that the kernels take: the last pair of an even number of columns, and
// of an odd one with an even and with an odd number of tiles.
void TestLarge() {
  constexpr int32_t kRows = 1 << 30;
  constexpr int32_t kTilesN = (1 << 29) / 128;
  for (int32_t cut : {0, 1, kUnit - 1}) {
    for (int rank = 0; rank < 2; ++rank) {
      const Pairs even = {kRows - cut, kTilesN};
      CHECK(even.Count() == int64_t{1} << 43);
      PairedTile last = even.At(even.Count() - 1, rank);
      CHECK(last.shared == SharedOperand::kA && last.n_tile == kTilesN - 2 + rank);
      CHECK(last.m == kRows - kMaxRows && last.num_m == kMaxRows - cut);

      const Pairs odd = {kRows - cut, kTilesN - 1};
      last = odd.At(odd.Count() - 1, rank);
      CHECK(last.shared == SharedOperand::kNone && last.n_tile == kTilesN - 2);
      CHECK(last.m == kRows - (2 - rank) * kMaxRows);
      CHECK(last.num_m == kMaxRows - rank * cut);

      const Pairs halves = {kRows - kMaxRows - cut, kTilesN - 1};
      last = halves.At(halves.Count() - 1, rank);
      CHECK(last.shared == SharedOperand::kNone && last.n_tile == kTilesN - 2);
      CHECK(last.m == kRows - 2 * kMaxRows + rank * kMaxRows / 2);
      CHECK(last.num_m == kMaxRows / 2 - rank * cut);
    }
  }
  const Pairs narrow = {1, kTilesN, true};
  CHECK(narrow.At(narrow.Count() - 1, 1).n_tile == kTilesN - 1);
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestAllOnce();
  jax_ep::TestOrder();
  jax_ep::TestNarrow();
  jax_ep::TestWide();
  jax_ep::TestEmpty();
  jax_ep::TestLarge();
  return jax_ep::testing::Finish();
}
