// The tile scheduler of the portable kernels.
#ifndef JAX_EP_DEVICE_MATMUL_PORTABLE_TILE_SCHEDULER_CUH_
#define JAX_EP_DEVICE_MATMUL_PORTABLE_TILE_SCHEDULER_CUH_

#include "ffi/device/matmul/group_search.cuh"

namespace jax_ep::portable {

// A tile of the result. `a`, `b` and `out` are offsets in elements to its first row or column.
struct Tile {
  int32_t group;
  int32_t row;     // first row of out
  int32_t column;  // first column of out
  int64_t a;
  int64_t b;
  int64_t out;
  int32_t num_m;  // valid rows from there on; may exceed the tile
  int32_t num_n;  // valid columns, likewise
  int32_t num_k;  // 0: the result is zeros
};

// Raster order of the tiles in one group's result: bands of at most kBandTiles tiles along m, each
// from the first column to the last, with m fastest. About a hundred tiles run at the same time;
// together they then form about a square, which minimizes the operands that they read.
template <int kTileM>
struct TileRaster {
  struct Position {
    int32_t m;       // first row
    int32_t n_tile;  // first column, in tiles
  };

  int32_t num_m;    // rows of the result
  int32_t tiles_n;  // tiles along n

  __device__ int64_t Count() const { return int64_t{CeilDivide(num_m, kTileM)} * tiles_n; }

  __device__ Position At(int64_t index) const {
    constexpr int kBandTiles = 16;
    const int64_t tiles_of_band = int64_t{kBandTiles} * tiles_n;
    const int32_t first = static_cast<int32_t>(index / tiles_of_band) * kBandTiles;
    const int64_t within = index % tiles_of_band;
    const int32_t height = min(kBandTiles, CeilDivide(num_m, kTileM) - first);
    return {(first + static_cast<int32_t>(within % height)) * kTileM,
            static_cast<int32_t>(within / height)};
  }
};

// A static persistent scheduler: block b computes tiles b, b + gridDim.x, and so on. All warps of a
// block iterate over the same tiles.
template <MatmulKind kKind, int kTileM>
class StaticTileScheduler {
 public:
  __device__ explicit StaticTileScheduler(const MatmulParams& params)
      : params_(params), groups_(params), index_(blockIdx.x) {}

  // Returns false if there are no more tiles.
  __device__ bool Next(Tile* tile) {
    GroupItem item;
    if (!groups_.Find(index_, &item)) return false;
    index_ += gridDim.x;
    const auto position = groups_.GroupRaster(item).At(item.index);
    const int64_t m = position.m;
    const int64_t n = int64_t{position.n_tile} * params_.out_tile_n;
    const int64_t group = item.group;
    const int64_t shape_n = params_.shape_n;
    tile->group = item.group;
    tile->row = item.first_row + position.m;
    tile->column = static_cast<int32_t>(n);
    tile->num_n = static_cast<int32_t>(shape_n - n);
    if constexpr (kIsRhsGradient<kKind>) {
      tile->a = item.first_row * params_.a.row_stride + m;
      tile->b = item.first_row * params_.b.row_stride + n;
      tile->out = (group * params_.shape_m + m) * shape_n + n;
      tile->num_m = static_cast<int32_t>(params_.shape_m - m);
      tile->num_k = item.end_row - item.first_row;
    } else {
      const int64_t row = item.first_row + m;
      tile->a = row * params_.a.row_stride;
      // A group's matrix has shape_k rows or, transposed, shape_n.
      tile->b = kHasTransposedB<kKind> ? (group * shape_n + n) * params_.b.row_stride
                                       : group * params_.shape_k * params_.b.row_stride + n;
      tile->out = row * shape_n + n;
      tile->num_m = static_cast<int32_t>(item.end_row - row);
      const bool is_tail = item.group == params_.groups.num_groups;
      tile->num_k = is_tail ? 0 : params_.shape_k;
    }
    return true;
  }

 private:
  const MatmulParams& params_;
  GroupSearch<kKind, TileRaster<kTileM>> groups_;
  int64_t index_;
};

}  // namespace jax_ep::portable

#endif  // JAX_EP_DEVICE_MATMUL_PORTABLE_TILE_SCHEDULER_CUH_
