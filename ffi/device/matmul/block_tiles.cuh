// The tiles that one block computes, and where their operands and results are.
#ifndef JAX_EP_DEVICE_MATMUL_BLOCK_TILES_CUH_
#define JAX_EP_DEVICE_MATMUL_BLOCK_TILES_CUH_

#include "ffi/device/matmul/group_tiles.cuh"

namespace jax_ep {

// out[0:num_m, 0:num_n] of a tile, and the offsets in elements where it and its operands begin.
struct MatmulTile {
  int32_t group;
  int32_t row;  // first of the result
  int32_t n;    // first column
  int64_t left;
  int64_t right;
  int64_t out;
  int32_t num_m;  // may reach past the tile
  int32_t num_n;
  int32_t num_k;  // 0: the result is zeros
};

// Of a tile in its group's result.
struct TilePlace {
  int32_t m;  // first row
  int32_t n;  // first column, in tiles
};

// Bands of at most kBand tiles along m, each from n = 0 to its end, m fastest. A hundred blocks at
// work then cover about a square of a group's result.
template <int kTileM>
struct TileBands {
  int32_t num_m;    // rows of the result
  int32_t tiles_n;  // columns, in tiles

  __device__ int64_t Count() const { return int64_t{CeilDivide(num_m, kTileM)} * tiles_n; }

  __device__ TilePlace Place(int64_t index) const {
    constexpr int kBand = 16;
    const int64_t tiles_of_band = int64_t{kBand} * tiles_n;
    const int32_t first = static_cast<int32_t>(index / tiles_of_band) * kBand;
    const int64_t within = index % tiles_of_band;
    const int32_t height = min(kBand, CeilDivide(num_m, kTileM) - first);
    return {(first + static_cast<int32_t>(within % height)) * kTileM,
            static_cast<int32_t>(within / height)};
  }
};

// A block's tiles: every gridDim.x-th. All warps of a block go through the same.
template <MatmulKind kKind, int kTileM>
class MatmulTiles {
 public:
  __device__ explicit MatmulTiles(const MatmulProblem& problem)
      : problem_(problem), groups_(problem), index_(blockIdx.x) {}

  __device__ bool Next(MatmulTile* tile) {
    GroupPart at;
    if (!groups_.Find(index_, &at)) return false;
    index_ += gridDim.x;
    const TilePlace place = groups_.LayoutOf(at).Place(at.index);
    const int64_t m = place.m;
    const int64_t n = int64_t{place.n} * problem_.tile_n;
    const int64_t group = at.group;
    const int64_t num_n = problem_.num_n;
    tile->group = at.group;
    tile->row = at.first_row + place.m;
    tile->n = static_cast<int32_t>(n);
    tile->num_n = static_cast<int32_t>(num_n - n);
    if constexpr (kIsRhsGradient<kKind>) {
      tile->left = at.first_row * problem_.left.pitch + m;
      tile->right = at.first_row * problem_.right.pitch + n;
      tile->out = (group * problem_.num_m + m) * num_n + n;
      tile->num_m = static_cast<int32_t>(problem_.num_m - m);
      tile->num_k = at.end_row - at.first_row;
    } else {
      const int64_t row = at.first_row + m;
      tile->left = row * problem_.left.pitch;
      // A matrix has the pitch's columns, or, transposed, its own number of rows.
      tile->right = kIsTransposed<kKind> ? (group * num_n + n) * problem_.right.pitch
                                         : group * problem_.num_k * problem_.right.pitch + n;
      tile->out = row * num_n + n;
      tile->num_m = static_cast<int32_t>(at.end_row - row);
      const bool is_tail = at.group == problem_.rows.num_groups;
      tile->num_k = is_tail ? 0 : problem_.num_k;
    }
    return true;
  }

 private:
  const MatmulProblem& problem_;
  GroupTiles<kKind, TileBands<kTileM>> groups_;
  int64_t index_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_BLOCK_TILES_CUH_
