// Which tiles of a grouped matmul's result there are, and where.
//
// Group sizes are known on the device only. Every block reads them and finds its tiles for itself;
// the sizes stay in the caches.
#ifndef JAX_EP_DEVICE_GROUP_TILES_CUH_
#define JAX_EP_DEVICE_GROUP_TILES_CUH_

#include "ffi/device/matmul_problem.h"

namespace jax_ep {

struct GroupTile {
  int32_t group;
  int32_t first_row;  // of the group
  int32_t end_row;
  int32_t m;  // tile coordinates within the group's result
  int32_t n;
};

// A warp's way through all tiles: group after group, and within a group in an order that lets
// blocks which run at the same time read the same operands.
//
// The m dimension of a result is either the group's rows (kTileM != 0) or of one size for all
// groups.
template <int kTileM>
class GroupTiles {
 public:
  // `tiles_m` is read only if kTileM is 0.
  __device__ GroupTiles(const GroupRows& rows, int32_t tiles_m, int32_t tiles_n)
      : rows_(rows), tiles_m_(tiles_m), tiles_n_(tiles_n) {}

  // All lanes together, with indices that never decrease. False: there is no such tile, nor a
  // later.
  __device__ bool Find(int64_t index, GroupTile* tile) {
    constexpr uint32_t kWarp = 0xffffffffu;
    const int32_t num_entries = rows_.num_groups + (rows_.with_tail ? 1 : 0);
    const int lane = threadIdx.x % 32;
    for (; first_group_ < num_entries; first_group_ += 32) {
      // One group a lane, and two sums over lower lanes. Row numbers saturate at num_rows, which is
      // below 2^31, so a sum of two fits 32 bits.
      const int32_t group = first_group_ + lane;
      uint32_t end = lane == 0 ? rows_before_ : 0;
      end = min(end + Size(group), static_cast<uint32_t>(rows_.num_rows));
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint32_t lower = __shfl_up_sync(kWarp, end, distance);
        if (lane >= distance) end = min(end + lower, static_cast<uint32_t>(rows_.num_rows));
      }
      uint32_t begin = __shfl_up_sync(kWarp, end, 1);
      if (lane == 0) begin = rows_before_;

      const int32_t tiles_m = group < num_entries ? TilesM(end - begin) : 0;
      const int64_t tiles = int64_t{tiles_m} * tiles_n_;
      int64_t tiles_end = (lane == 0 ? tiles_before_ : 0) + tiles;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int64_t lower = __shfl_up_sync(kWarp, tiles_end, distance);
        if (lane >= distance) tiles_end += lower;
      }

      const uint32_t lanes_past = __ballot_sync(kWarp, index < tiles_end);
      if (lanes_past != 0) {
        const int owner = __ffs(lanes_past) - 1;
        tile->group = first_group_ + owner;
        tile->first_row = __shfl_sync(kWarp, begin, owner);
        tile->end_row = __shfl_sync(kWarp, end, owner);
        PlaceInGroup(index - __shfl_sync(kWarp, tiles_end - tiles, owner),
                     __shfl_sync(kWarp, tiles_m, owner), tile);
        return true;
      }
      rows_before_ = __shfl_sync(kWarp, end, 31);
      tiles_before_ = __shfl_sync(kWarp, tiles_end, 31);
    }
    return false;
  }

 private:
  // Clipped, because a sum of two sizes must fit.
  __device__ uint32_t Size(int32_t group) const {
    if (group < rows_.num_groups) return min(max(rows_.sizes[group], 0), rows_.num_rows);
    return group == rows_.num_groups && rows_.with_tail ? rows_.num_rows : 0;
  }

  __device__ int32_t TilesM(uint32_t num_rows) const {
    if constexpr (kTileM != 0) return CeilDivide(num_rows, kTileM);
    return tiles_m_;
  }

  // Bands of at most kBand tiles along m, each from n = 0 to its end, m fastest. A hundred blocks
  // at work then cover about a square of the result.
  __device__ void PlaceInGroup(int64_t index, int32_t tiles_m, GroupTile* tile) const {
    constexpr int kBand = 16;
    const int64_t tiles_of_band = int64_t{kBand} * tiles_n_;
    const int32_t first = static_cast<int32_t>(index / tiles_of_band) * kBand;
    const int64_t within = index % tiles_of_band;
    const int32_t height = min(kBand, tiles_m - first);
    tile->m = first + static_cast<int32_t>(within % height);
    tile->n = static_cast<int32_t>(within / height);
  }

  const GroupRows rows_;
  const int32_t tiles_m_;
  const int32_t tiles_n_;
  int32_t first_group_ = 0;  // of the 32 that are looked at
  uint32_t rows_before_ = 0;
  int64_t tiles_before_ = 0;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_GROUP_TILES_CUH_
