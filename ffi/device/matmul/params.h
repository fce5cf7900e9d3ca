// Parameters of the grouped matmul kernels.
#ifndef JAX_EP_DEVICE_MATMUL_PARAMS_H_
#define JAX_EP_DEVICE_MATMUL_PARAMS_H_

#include "ffi/device/common/integers.h"
#include "ffi/device/common/limits.h"

namespace jax_ep {

// Every kind computes, for each group, out[m, n] = sum over k of a[m, k] * b[k, n].
enum class MatmulKind {
  // grouped_matmul. m runs over the group's rows; a is lhs, b is rhs[group].
  kForward,
  // grouped_matmul with transpose_rhs: kForward with b stored as [n, k].
  kForwardTransposed,
  // grouped_matmul_rhs_gradient. k runs over the group's rows; a is lhs, stored as [k, m], and b is
  // out_gradient. Each group has an [m, n] matrix of its own in out, perhaps an accumulator.
  kRhsGradient,
  // grouped_matmul_activation: kForward followed by a bias, an activation and row weights.
  kActivation,
  // grouped_matmul_activation_gradient: kForwardTransposed followed by the activation's gradient.
  kActivationGradient
};

template <MatmulKind kKind>
inline constexpr bool kIsRhsGradient = kKind == MatmulKind::kRhsGradient;
template <MatmulKind kKind>
inline constexpr bool kIsActivation = kKind == MatmulKind::kActivation;

// Returns whether b is stored as [n, k].
JAX_EP_HOST_DEVICE constexpr bool HasTransposedB(MatmulKind kind) {
  return kind == MatmulKind::kForwardTransposed || kind == MatmulKind::kActivationGradient;
}
template <MatmulKind kKind>
inline constexpr bool kHasTransposedB = HasTransposedB(kKind);

// A row-major matrix, or a stack of them.
struct MatmulOperand {
  const void* data;
  int64_t row_stride;  // elements
  bool is_float32;     // rounded to the kernel's element type when it is loaded
  bool is_aligned;     // every row begins at a multiple of 16 bytes
};

// The rows of the input, split into consecutive groups. Kernels read negative sizes as 0 and clip
// the groups at num_rows.
struct RowGroups {
  const int32_t* sizes;
  int32_t num_groups;
  int32_t num_rows;  // in all groups and the tail after them
  bool zero_tail;    // the tail is one more group, with index num_groups: its result is zeros
};

// An activation is f(x). If it is gated, the columns of the pre-activation are two halves, gate and
// up, and it is f(gate) * up.
struct ActivationFunction {
  bool is_identity;
  bool is_gated;
  bool is_smooth;   // f(x) = x * sigmoid(linear * x + cubic * x^3); otherwise f(x) = max(x, 0)
  bool is_squared;  // f(x) = max(x, 0)^2, if not smooth
  float linear;
  float cubic;
  float exp2_linear;  // -log2(e) * linear: exp(-u) is computed by exp2
  float exp2_cubic;   // -log2(e) * cubic
};

// A clamped SwiGLU is f(min(gate, limit)) * (up between -limit and limit, plus up_offset). An
// infinite limit and an offset of -0 change nothing.
struct GateLimits {
  float limit;
  float up_offset;
};

// Each row of row_dots has one dot product per this many columns of `out`.
inline constexpr int kColumnsPerDot = 128;

// Parameters of kActivation and kActivationGradient. `out` has F columns. The pre-activation has F
// columns as well, or 2F if the activation is gated: F of the gate, then F of up.
struct EpilogueParams {
  ActivationFunction activation;
  const float* bias;              // kActivation: [groups, columns of the pre-activation], or null
  const float* row_weights;       // one per row, or null
  void* pre_activation;           // kActivation: an output, or null; kActivationGradient: an input
  void* pre_activation_gradient;  // kActivationGradient: an output
  float* row_dots;  // kActivationGradient: an output [rows, CeilDivide(F, kColumnsPerDot)]
};

struct MatmulParams {
  MatmulOperand a;
  MatmulOperand b;
  void* out;
  bool out_is_float32;  // otherwise the kernel's element type
  bool out_is_aligned;  // a thread may store its adjacent elements at once
  bool accumulates;     // kRhsGradient: adds to out, in float32; groups without rows keep theirs
  int32_t shape_m;      // kRhsGradient only; otherwise each group has its own
  int32_t shape_n;
  int32_t shape_k;          // all but kRhsGradient
  int32_t out_tile_n;       // columns of `out` per tile: half of the tile's if kActivation is gated
  int32_t b_column_blocks;  // sm_90: column blocks in a TMA box of b, see Sm90Kernel
  bool halves_columns;      // sm_90: see SwappedTilePairs
  bool halves_rows;         // sm_90: see SwappedWideTilePairs
  bool has_few_pairs;       // sm_90: and not few rows per group; see RunScheduler
  RowGroups groups;
  EpilogueParams epilogue;
  int32_t tile_counter;  // sm_90: the launch's own, see TileCounter; negative: none
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_PARAMS_H_
