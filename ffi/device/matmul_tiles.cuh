// The tiles that one block computes, and where their operands and results are.
#ifndef JAX_EP_DEVICE_MATMUL_TILES_CUH_
#define JAX_EP_DEVICE_MATMUL_TILES_CUH_

#include "ffi/device/group_tiles.cuh"

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

// A block's tiles: every gridDim.x-th. All warps of a block go through the same.
template <MatmulKind kKind, int kTileM>
class MatmulTiles {
 public:
  __device__ explicit MatmulTiles(const MatmulProblem& problem)
      : problem_(problem),
        groups_(problem.rows, CeilDivide(problem.num_m, kTileM),
                CeilDivide(problem.num_n, problem.tile_n)),
        index_(blockIdx.x) {}

  __device__ bool Next(MatmulTile* tile) {
    GroupTile at;
    if (!groups_.Find(index_, &at)) return false;
    index_ += gridDim.x;
    const int64_t m = int64_t{at.m} * kTileM;
    const int64_t n = int64_t{at.n} * problem_.tile_n;
    const int64_t group = at.group;
    const int64_t num_n = problem_.num_n;
    tile->group = at.group;
    tile->row = at.first_row + at.m * kTileM;
    tile->n = static_cast<int32_t>(n);
    tile->num_n = static_cast<int32_t>(num_n - n);
    if constexpr (kIsGradient<kKind>) {
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
  GroupTiles<kIsGradient<kKind> ? 0 : kTileM> groups_;
  int64_t index_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_TILES_CUH_
