#include "ffi/device/matmul/sm90/schedule/tile_pairs.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

constexpr int kTileM = 128;
constexpr int kHalfM = kTileM / 2;
using Pairs = TilePairs<kTileM>;

int32_t EagerBuffers(const PairedTile& tile) {
  return CeilDivide(std::min(tile.num_m, kTileM), kHalfM);
}

// Checks the properties of a pair that the kernel relies on.
void CheckPair(const Pairs& pairs, const PairedTile (&tiles)[2]) {
  CHECK(tiles[0].shared == tiles[1].shared);
  CHECK(tiles[0].num_m > 0 && tiles[1].num_m <= tiles[0].num_m);
  if (tiles[0].shared == SharedOperand::kB) {
    CHECK(tiles[0].n_tile == tiles[1].n_tile);
  } else {
    CHECK(tiles[0].m == tiles[1].m && tiles[0].num_m == tiles[1].num_m);
    CHECK(tiles[0].n_tile + 1 == tiles[1].n_tile);
  }
  for (const PairedTile& tile : tiles) {
    CHECK(0 <= tile.n_tile && tile.n_tile < pairs.tiles_n);
    CHECK(tile.m % kHalfM == 0);
    const int32_t rest = pairs.num_m - tile.m;
    CHECK(tile.num_m == rest || tile.num_m == std::clamp(rest, 0, kHalfM));
  }
}

// Every half of 64 rows of every column is computed once. Neither block of a pair waits for the
// other, except for the halves of a last column, and beside a half tile.
void TestAllOnce() {
  for (int32_t rows = 0; rows < 6000; rows += rows < 700 ? 1 : 61) {
    for (int32_t tiles_n = 1; tiles_n <= 9; ++tiles_n) {
      const Pairs pairs = {rows, tiles_n};
      const int32_t halves = CeilDivide(rows, kHalfM);
      std::vector<int> times(static_cast<size_t>(halves) * tiles_n);
      int32_t waited = 0;
      for (int64_t i = 0; i < pairs.Count(); ++i) {
        const PairedTile tiles[2] = {pairs.At(i, 0), pairs.At(i, 1)};
        CheckPair(pairs, tiles);
        for (const PairedTile& tile : tiles) {
          for (int32_t half = 0; half < EagerBuffers(tile); ++half) {
            ++times.at(static_cast<size_t>(tile.m / kHalfM + half) * tiles_n + tile.n_tile);
          }
        }
        waited += EagerBuffers(tiles[0]) - EagerBuffers(tiles[1]);
      }
      CHECK(std::all_of(times.begin(), times.end(), [](int count) { return count == 1; }));
      const bool ends_in_half = halves % 2 == 1;
      const bool is_even = CeilDivide(rows, kTileM) % 2 == 0;
      CHECK(waited == (!ends_in_half ? 0 : is_even ? tiles_n : tiles_n % 2));
    }
  }
}

// Consecutive pairs share operands: neighbors along m are a pair, bands of 16 follow one another,
// and a band goes through its columns two at a time.
void TestOrder() {
  constexpr int32_t kBandM = 16 * kTileM;
  const Pairs pairs = {40 * kTileM, 12};
  PairedTile last = pairs.At(0, 0);
  for (int64_t i = 0; i < pairs.Count(); ++i) {
    const PairedTile first = pairs.At(i, 0);
    CHECK(pairs.At(i, 1).m == first.m + kTileM);
    if (first.m / kBandM == last.m / kBandM) {
      CHECK(first.n_tile / 2 >= last.n_tile / 2);
    } else {
      CHECK(first.m / kBandM == last.m / kBandM + 1 && first.n_tile == 0);
    }
    last = first;
  }
}

// The most rows and columns that the kernels take.
void TestLarge() {
  const Pairs pairs = {1 << 30, (1 << 29) / 128};
  CHECK(pairs.Count() == int64_t{1} << 44);
  for (int rank = 0; rank < 2; ++rank) {
    const PairedTile last = pairs.At(pairs.Count() - 1, rank);
    CHECK(last.m == (1 << 30) - (2 - rank) * kTileM);
    CHECK(last.n_tile == pairs.tiles_n - 1);
  }
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestAllOnce();
  jax_ep::TestOrder();
  jax_ep::TestLarge();
  return jax_ep::testing::Finish();
}
