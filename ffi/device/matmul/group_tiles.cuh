// Which group a part of a grouped matmul's result is of: a tile, or a pair of them.
//
// Group sizes are known on the device only. Every block, or one of each cluster, reads them and
// finds its parts for itself; the sizes stay in the caches.
#ifndef JAX_EP_DEVICE_MATMUL_GROUP_TILES_CUH_
#define JAX_EP_DEVICE_MATMUL_GROUP_TILES_CUH_

#include "ffi/device/matmul/problem.h"

namespace jax_ep {

struct GroupPart {
  int32_t group;
  int32_t first_row;  // of the group
  int32_t end_row;
  int64_t index;  // of the part, within the group's result
};

// A warp's way through all parts of all results, group after group. A Layout of rows and tiles
// along n has Count() parts of one group's result.
template <MatmulKind kKind, typename Layout>
class GroupTiles {
 public:
  __device__ explicit GroupTiles(const MatmulProblem& problem)
      : problem_(problem), tiles_n_(CeilDivide(problem.num_n, problem.tile_n)) {}

  // Of the part's group.
  __device__ Layout LayoutOf(const GroupPart& part) const {
    return LayoutOfRows(part.end_row - part.first_row);
  }

  // All lanes together, with indices that never decrease. False: there is no such part, nor a
  // later.
  __device__ bool Find(int64_t index, GroupPart* part) {
    constexpr uint32_t kWarp = 0xffffffffu;
    const GroupRows& rows = problem_.rows;
    const int32_t num_entries = rows.num_groups + (rows.with_tail ? 1 : 0);
    const int lane = threadIdx.x % 32;
    for (; first_group_ < num_entries; first_group_ += 32) {
      // One group a lane, and two sums over lower lanes. Row numbers saturate at num_rows, which is
      // below 2^31, so a sum of two fits 32 bits.
      const int32_t group = first_group_ + lane;
      uint32_t end = lane == 0 ? rows_before_ : 0;
      end = min(end + Size(group), static_cast<uint32_t>(rows.num_rows));
      for (int distance = 1; distance < 32; distance *= 2) {
        const uint32_t lower = __shfl_up_sync(kWarp, end, distance);
        if (lane >= distance) end = min(end + lower, static_cast<uint32_t>(rows.num_rows));
      }
      uint32_t begin = __shfl_up_sync(kWarp, end, 1);
      if (lane == 0) begin = rows_before_;

      const int64_t parts = group < num_entries ? LayoutOfRows(end - begin).Count() : 0;
      int64_t parts_end = (lane == 0 ? parts_before_ : 0) + parts;
      for (int distance = 1; distance < 32; distance *= 2) {
        const int64_t lower = __shfl_up_sync(kWarp, parts_end, distance);
        if (lane >= distance) parts_end += lower;
      }

      const uint32_t lanes_past = __ballot_sync(kWarp, index < parts_end);
      if (lanes_past != 0) {
        const int owner = __ffs(lanes_past) - 1;
        part->group = first_group_ + owner;
        part->first_row = __shfl_sync(kWarp, begin, owner);
        part->end_row = __shfl_sync(kWarp, end, owner);
        part->index = index - __shfl_sync(kWarp, parts_end - parts, owner);
        return true;
      }
      rows_before_ = __shfl_sync(kWarp, end, 31);
      parts_before_ = __shfl_sync(kWarp, parts_end, 31);
    }
    return false;
  }

 private:
  // Clipped, because a sum of two sizes must fit.
  __device__ uint32_t Size(int32_t group) const {
    const GroupRows& rows = problem_.rows;
    if (group < rows.num_groups) return min(max(rows.sizes[group], 0), rows.num_rows);
    return group == rows.num_groups && rows.with_tail ? rows.num_rows : 0;
  }

  // The result has the group's rows, or, of a gradient, the matrix's.
  __device__ Layout LayoutOfRows(int32_t group_rows) const {
    return {kIsRhsGradient<kKind> ? problem_.num_m : group_rows, tiles_n_};
  }

  const MatmulProblem& problem_;
  const int32_t tiles_n_;
  int32_t first_group_ = 0;  // of the 32 that are looked at
  uint32_t rows_before_ = 0;
  int64_t parts_before_ = 0;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_GROUP_TILES_CUH_
