// Tests the search for the group of a work item, in one emulated warp, against a loop over groups.
#include "ffi/device/matmul/group_search.cuh"

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

#include "ffi/device/matmul/sm90/schedule/tile_scheduler.cuh"
#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

constexpr int kTileRows = 16;

struct Raster {
  int32_t rows;
  int32_t tiles_n;
  int64_t Count() const { return int64_t{CeilDivide(rows, kTileRows)} * tiles_n; }
};

// Has groups whose items come first, if a call has few pairs.
struct TallRaster : Raster {
  bool IsTall() const { return rows > 2 * kTileRows; }
};

// Returns all items in their order.
std::vector<GroupItem> AllItems(bool is_rhs_gradient, const MatmulParams& params) {
  const RowGroups& groups = params.groups;
  const int32_t tiles_n = CeilDivide(params.shape_n, params.out_tile_n);
  std::vector<GroupItem> items;
  int64_t first = 0;
  for (int32_t group = 0; group < groups.num_groups + groups.zero_tail; ++group) {
    const int64_t size = group < groups.num_groups ? max(groups.sizes[group], 0) : groups.num_rows;
    const int64_t end = min(first + size, int64_t{groups.num_rows});
    const auto rows = static_cast<int32_t>(end - first);
    const bool is_kept = params.accumulates && rows == 0;
    const Raster raster = {!is_rhs_gradient ? rows : is_kept ? 0 : params.shape_m, tiles_n};
    for (int64_t index = 0; index < raster.Count(); ++index) {
      items.push_back({group, static_cast<int32_t>(first), static_cast<int32_t>(end), index});
    }
    first = end;
  }
  return items;
}

// Finds every `stride`-th item, and counts all of them.
template <MatmulKind kKind, typename Raster = Raster>
void CheckSearch(const MatmulParams& params, int64_t stride) {
  std::vector<GroupItem> items = AllItems(kIsRhsGradient<kKind>, params);
  if (params.has_few_pairs) {
    std::stable_partition(items.begin(), items.end(), [](const GroupItem& item) {
      return TallRaster{{item.end_row - item.first_row}}.IsTall();
    });
  }
  const auto num_items = static_cast<int64_t>(items.size());
  int64_t num_rows = 0;
  for (int32_t group = 0; group < params.groups.num_groups; ++group) {
    num_rows += std::max(params.groups.sizes[group], 0);
  }
  const auto search_all = [&] {
    GroupSearch<kKind, Raster> search(params);
    int64_t index = 0;
    GroupItem found;
    for (; search.Find(index, &found); index += stride) {
      if (index >= num_items) break;
      const GroupItem& expected = items[static_cast<size_t>(index)];
      CHECK(found.group == expected.group && found.index == expected.index);
      CHECK(found.first_row == expected.first_row && found.end_row == expected.end_row);
    }
    CHECK(index >= num_items && index < num_items + stride);
    const uint32_t count = GroupSearch<kKind, Raster>(params).Count();
    CHECK(num_rows > params.groups.num_rows || count == num_items);
  };
  emulation::RunGrid(0, {.blocks = 1, .threads = 32, .shared_bytes = 0, .kernel = search_all});
}

void CheckSizes(const std::vector<int32_t>& sizes, int32_t num_rows) {
  MatmulParams params = {};
  params.shape_m = 40;
  params.shape_n = 64;
  params.out_tile_n = 32;
  params.groups = {sizes.data(), static_cast<int32_t>(sizes.size()), num_rows, false};
  for (int64_t stride : {1, 7}) {
    for (bool zero_tail : {false, true}) {
      params.groups.zero_tail = zero_tail;
      CheckSearch<MatmulKind::kForward>(params, stride);
      params.has_few_pairs = true;
      CheckSearch<MatmulKind::kForward, TallRaster>(params, stride);
      params.has_few_pairs = false;
    }
    params.groups.zero_tail = false;
    for (bool accumulates : {false, true}) {
      params.accumulates = accumulates;
      CheckSearch<MatmulKind::kRhsGradient>(params, stride);
    }
    params.accumulates = false;
  }
}

// Checks that every pair's rows are handed out once, also if `counted` is wrong. If it is right,
// pairs of the last wave are cut where each of two clusters can have a half of one.
void CheckLastWave(uint32_t pairs, uint32_t counted, uint32_t clusters, int32_t num_m) {
  const sm90::LastWave wave(counted, clusters);
  std::vector<int32_t> rows(pairs);
  for (int64_t index = 0;; ++index) {
    const int64_t pair = wave.Pair(index);
    if (pair >= pairs) break;
    CHECK(index >= clusters || pair == index);  // FindFirstTile knows no halves
    sm90::Tile tile = {.num_m = num_m, .num_k = 1, .shared = SharedOperand::kA};
    if (!wave.Cut<SwappedTilePairs>(index, 0, &tile)) continue;
    CHECK(tile.m == rows[pair] && tile.num_m > 0);
    rows[pair] += tile.num_m;
    const uint32_t left = pairs % clusters;
    const bool is_cut = pairs > clusters && 2 * left <= clusters && pair >= pairs - left;
    if (counted == pairs) CHECK((tile.num_m < num_m) == (is_cut && num_m >= 128));
  }
  for (int32_t count : rows) CHECK(count == num_m);
}

// Checks that both halves of every wide pair are handed out once: a cut one's have the columns of
// one tile each.
void CheckLastWaveOfWideTiles(uint32_t pairs, uint32_t clusters) {
  constexpr int32_t kTileN = 64;
  const sm90::LastWave wave(pairs, clusters);
  std::vector<int32_t> halves(pairs);
  for (int64_t index = 0;; ++index) {
    const int64_t pair = wave.Pair(index);
    if (pair >= pairs) break;
    sm90::Tile tile = {.n = 128, .num_m = 100, .num_k = 1, .shared = SharedOperand::kAWide};
    CHECK(wave.Cut<SwappedWideTilePairs>(index, kTileN, &tile));
    const bool is_cut = wave.Has(index);
    CHECK(tile.num_m == 100 && tile.m == 0);
    CHECK(tile.shared == (is_cut ? SharedOperand::kA : SharedOperand::kAWide));
    CHECK(tile.n == 128 + (is_cut ? halves[pair] * kTileN : 0));
    halves[pair] += is_cut ? 1 : 2;
  }
  for (int32_t count : halves) CHECK(count == 2);
}

// Sizes of one layer among `num_layers`.
std::vector<int32_t> Stack(const std::vector<int32_t>& sizes, size_t num_layers, size_t layer) {
  std::vector<int32_t> all(num_layers * sizes.size());
  std::copy(sizes.begin(), sizes.end(), all.begin() + layer * sizes.size());
  return all;
}

}  // namespace
}  // namespace jax_ep

int main() {
  using namespace jax_ep;
  std::mt19937 random(1);
  for (size_t num_groups : {1, 3, 32, 33, 100}) {
    std::vector<int32_t> sizes(num_groups);
    for (int32_t& size : sizes) size = random() % 3 == 0 ? -5 : static_cast<int32_t>(random() % 50);
    for (int32_t num_rows : {1, 300, 3000}) CheckSizes(sizes, num_rows);
  }
  const std::vector<int32_t> layer = {17, 0, 3, 40, 0};
  for (size_t index : {0, 12, 19}) CheckSizes(Stack(layer, 20, index), 64);
  // With 256 groups or more, blocks of 32 without rows are passed.
  for (size_t num_layers : {51, 52, 103, 150}) {
    for (size_t index : {size_t{0}, size_t{50}, num_layers - 1}) {
      CheckSizes(Stack(layer, num_layers, index), 64);
    }
  }
  CheckSizes(std::vector<int32_t>(70), 64);
  CheckSizes({std::numeric_limits<int32_t>::max(), 5, std::numeric_limits<int32_t>::min()}, 64);
  for (uint32_t clusters = 1; clusters <= 9; ++clusters) {
    for (uint32_t pairs = 0; pairs <= 30; ++pairs) {
      CheckLastWaveOfWideTiles(pairs, clusters);
      for (int32_t num_m : {127, 128, 129, 250, 256}) {
        for (uint32_t counted : {pairs, pairs + 3, pairs / 2}) {
          CheckLastWave(pairs, counted, clusters, num_m);
        }
      }
    }
  }
  return testing::Finish();
}
