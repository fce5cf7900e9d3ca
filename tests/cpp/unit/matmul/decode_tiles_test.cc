#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ffi/device/matmul/sm90/mxfp4_decode/tiles.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

constexpr int32_t kRows = DecodeTiles::kRows;

// Every row of every column is in one tile, and tiles of the same columns follow each other.
void TestAllOnce() {
  for (int32_t rows = 0; rows < 200; ++rows) {
    for (int32_t tiles_n = 1; tiles_n <= 9; ++tiles_n) {
      const DecodeTiles tiles = {rows, tiles_n};
      std::vector<int> times(static_cast<size_t>(rows) * tiles_n);
      int32_t last_n = 0;
      for (int64_t i = 0; i < tiles.Count(); ++i) {
        const DecodeTiles::Place at = tiles.At(i);
        CHECK(at.n_tile == last_n || at.n_tile == last_n + 1);
        CHECK(0 <= at.m && at.m < rows && at.n_tile < tiles_n);
        last_n = at.n_tile;
        for (int32_t row = at.m; row < std::min(at.m + kRows, rows); ++row) {
          ++times.at(static_cast<size_t>(row) * tiles_n + at.n_tile);
        }
      }
      CHECK(std::all_of(times.begin(), times.end(), [](int count) { return count == 1; }));
    }
  }
}

// Nothing overflows.
void TestMost() {
  constexpr int32_t kMost = 1 << 30;
  CHECK((DecodeTiles{kMost, 64}.Count() == int64_t{kMost} / kRows * 64));
  CHECK((DecodeTiles{1, kMost}.At(kMost - 1).n_tile == kMost - 1));
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestAllOnce();
  jax_ep::TestMost();
  return jax_ep::testing::Finish();
}
