// Finds the group that a work item belongs to. Work items, tiles or pairs of tiles, are numbered
// through the results of all groups, one group after another.
//
// Group sizes are known on the device only. Each warp that needs items reads the sizes and searches
// for itself; the sizes stay in the caches.
#ifndef JAX_EP_DEVICE_MATMUL_GROUP_SEARCH_CUH_
#define JAX_EP_DEVICE_MATMUL_GROUP_SEARCH_CUH_

#include "ffi/device/matmul/params.h"

namespace jax_ep {

struct GroupItem {
  int32_t group;
  int32_t first_row;  // the group's rows are [first_row, end_row)
  int32_t end_row;
  int64_t index;  // the item's index within its group
};

// A Raster is made from {rows of a group's result, tiles along n}. Its Count() is the number of
// work items in that result. If it has IsTall(), and the call has few pairs, groups whose items are
// tall come first.
template <MatmulKind kKind, typename Raster>
class GroupSearch {
 public:
  __device__ explicit GroupSearch(const MatmulParams& params)
      : params_(params), tiles_n_(CeilDivide(params.shape_n, params.out_tile_n)) {}

  __device__ Raster GroupRaster(const GroupItem& item) const {
    return MakeRaster(item.end_row - item.first_row);
  }

  // Called by all lanes of a warp, with indices that never decrease. Returns false if there is no
  // item with this index, and then none with a higher one.
  __device__ bool Find(int64_t index, GroupItem* item) {
    while (!FindInPass(index, item)) {
      if (!kHasTall || !params_.has_few_pairs || !is_tall_) return false;
      is_tall_ = false;
      first_group_ = 0;
      rows_before_ = 0;
    }
    return true;
  }

  // Called by all lanes of a warp. Returns the number of items, if the sizes do not add up to more
  // rows than there are.
  __device__ uint32_t Count() const {
    uint32_t items = 0;
    uint32_t rows = 0;
    for (int32_t group = threadIdx.x % 32; group < params_.groups.num_groups; group += 32) {
      const uint32_t size = ClippedSize(group);
      rows += size;
      items += static_cast<uint32_t>(MakeRaster(size).Count());
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      items += __shfl_xor_sync(kAllLanes, items, lanes);
      rows += __shfl_xor_sync(kAllLanes, rows, lanes);
    }
    const auto num_rows = static_cast<uint32_t>(params_.groups.num_rows);
    if (!params_.groups.zero_tail || rows >= num_rows) return items;
    return items + static_cast<uint32_t>(MakeRaster(num_rows - rows).Count());
  }

 private:
  static constexpr uint32_t kAllLanes = 0xffffffffu;
  static constexpr bool kHasTall = requires(Raster raster) { raster.IsTall(); };

  __device__ bool FindInPass(int64_t index, GroupItem* item) {
    const RowGroups& groups = params_.groups;
    const int32_t num_entries = groups.num_groups + (groups.zero_tail ? 1 : 0);
    const int lane = threadIdx.x % 32;
    for (; first_group_ < num_entries; first_group_ += 32) {
      PassEmptyBlocks();
      // Each lane has one group. Two prefix sums over the lanes give its rows and its items. Row
      // numbers saturate at num_rows, which is below 2^31, so the sum of two fits 32 bits.
      const int32_t group = first_group_ + lane;
      uint32_t end = lane == 0 ? rows_before_ : 0;
      end = min(end + ClippedSize(group), static_cast<uint32_t>(groups.num_rows));
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint32_t lower = __shfl_up_sync(kAllLanes, end, distance);
        if (lane >= distance) end = min(end + lower, static_cast<uint32_t>(groups.num_rows));
      }
      uint32_t begin = __shfl_up_sync(kAllLanes, end, 1);
      if (lane == 0) begin = rows_before_;

      const int64_t items = group < num_entries ? CountInPass(MakeRaster(end - begin)) : 0;
      int64_t items_end = (lane == 0 ? items_before_ : 0) + items;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int64_t lower = __shfl_up_sync(kAllLanes, items_end, distance);
        if (lane >= distance) items_end += lower;
      }

      const uint32_t lanes_past = __ballot_sync(kAllLanes, index < items_end);
      if (lanes_past != 0) {
        const int owner = __ffs(lanes_past) - 1;
        item->group = first_group_ + owner;
        item->first_row = __shfl_sync(kAllLanes, begin, owner);
        item->end_row = __shfl_sync(kAllLanes, end, owner);
        item->index = index - __shfl_sync(kAllLanes, items_end - items, owner);
        return true;
      }
      rows_before_ = __shfl_sync(kAllLanes, end, 31);
      items_before_ = __shfl_sync(kAllLanes, items_end, 31);
    }
    return false;
  }

  __device__ int64_t CountInPass(const Raster& raster) const {
    if constexpr (kHasTall) {
      if (params_.has_few_pairs && raster.IsTall() != is_tall_) return 0;
    }
    return raster.Count();
  }

  // Clips to [0, num_rows], because the sum of two sizes must fit 32 bits.
  __device__ uint32_t ClippedSize(int32_t group) const {
    const RowGroups& groups = params_.groups;
    if (group < groups.num_groups) return min(max(groups.sizes[group], 0), groups.num_rows);
    return group == groups.num_groups && groups.zero_tail ? groups.num_rows : 0;
  }

  // Of many groups, such as those of all layers in a stack, passes blocks of 32 without rows. Their
  // sizes are loaded for many blocks at once, which takes as long as the prefix sums of one.
  __device__ void PassEmptyBlocks() {
    constexpr int kBlocks = 8;
    const int32_t num_groups = params_.groups.num_groups;
    if (num_groups < 32 * kBlocks) return;
    if (kIsRhsGradient<kKind> && !params_.accumulates) return;  // an empty group's result is zeros
    int passed = kBlocks;
    while (passed == kBlocks && first_group_ < num_groups) {
#pragma unroll
      for (int block = kBlocks - 1; block >= 0; --block) {
        const int32_t group = first_group_ + 32 * block + threadIdx.x % 32;
        if (__any_sync(kAllLanes, ClippedSize(group) != 0)) passed = block;
      }
      first_group_ += 32 * passed;
    }
  }

  // Each group's result has the group's rows, but in the gradient of rhs it is a whole matrix. An
  // accumulator to which nothing is added has no items.
  __device__ Raster MakeRaster(int32_t group_rows) const {
    if constexpr (!kIsRhsGradient<kKind>) {
      Raster raster = {group_rows, tiles_n_};
      if constexpr (requires { raster.halves_columns; }) {  // as SwappedTilePairs has it
        raster.halves_columns = params_.halves_columns;
      }
      if constexpr (requires { raster.halves_rows; }) {  // as SwappedWideTilePairs has it
        raster.halves_rows = params_.halves_rows;
      }
      return raster;
    }
    const bool is_kept = params_.accumulates && group_rows == 0;
    return {is_kept ? 0 : params_.shape_m, tiles_n_};
  }

  const MatmulParams& params_;
  const int32_t tiles_n_;
  int32_t first_group_ = 0;  // the first of the 32 groups that the lanes hold
  uint32_t rows_before_ = 0;
  int64_t items_before_ = 0;
  bool is_tall_ = true;  // the pass: groups with tall items, or all others
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_GROUP_SEARCH_CUH_
