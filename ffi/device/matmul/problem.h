// What the kernels of a grouped matmul are given.
#ifndef JAX_EP_DEVICE_MATMUL_PROBLEM_H_
#define JAX_EP_DEVICE_MATMUL_PROBLEM_H_

#include "ffi/device/common/integers.h"
#include "ffi/device/common/limits.h"

namespace jax_ep {

// For each group, out[m, n] = sum over k of left[m, k] * right[k, n].
enum class MatmulKind {
  kForward,            // m: the group's rows; left is lhs, right is rhs[group]
  kForwardTransposed,  // the same, but rhs[group] is stored as [n, k]
  kRhsGradient,        // k: the group's rows; left is stored as [k, m], out is [group, m, n]
  kActivation,         // kForward, and what EpilogueParams says
  kActivationGradient  // kForwardTransposed, and what EpilogueParams says
};

template <MatmulKind kKind>
inline constexpr bool kIsRhsGradient = kKind == MatmulKind::kRhsGradient;
JAX_EP_HOST_DEVICE constexpr bool IsTransposed(MatmulKind kind) {
  return kind == MatmulKind::kForwardTransposed || kind == MatmulKind::kActivationGradient;
}
template <MatmulKind kKind>
inline constexpr bool kIsTransposed = IsTransposed(kKind);
template <MatmulKind kKind>
inline constexpr bool kIsActivation = kKind == MatmulKind::kActivation;

// f(gate) * up if there are two halves of columns, gate and up, else f of the one.
struct ActivationFunction {
  bool is_identity;
  bool is_gated;
  bool is_smooth;   // f(x) = x * sigmoid(linear * x + cubic * x^3), else max(x, 0)
  bool is_squared;  // or max(x, 0)^2
  float linear;
  float cubic;
  float power_linear;  // the same times -log2(e)
  float power_cubic;
};

// What kActivation and kActivationGradient make of sums. `out` has F columns; pre-activations have
// F, or 2F if the activation is gated: F of gate, F of up.
struct EpilogueParams {
  ActivationFunction activation;
  const float* bias;         // kActivation: [groups, pre-activations], or null
  const float* row_weights;  // of every row, or null
  void* pre_activation;      // kActivation: where they are kept, or null. Else: those kept
  void* gradient;            // kActivationGradient: of the pre-activations
  float* row_dots;           // kActivationGradient: [rows, blocks of kColumnsPerDot of F]
};
inline constexpr int kColumnsPerDot = 128;

// A row-major matrix.
struct MatmulOperand {
  const void* data;
  int64_t pitch;    // elements from row to row
  bool is_float32;  // to be rounded to the kernel's element type
  bool is_aligned;  // every row begins at a multiple of 16 bytes
};

// Rows of the input that belong together. Negative sizes count as 0, rows past the last as none.
struct GroupRows {
  const int32_t* sizes;
  int32_t num_groups;
  int32_t num_rows;  // of all groups and the tail
  bool with_tail;    // what follows the last group is one more group, whose index is num_groups
};

struct MatmulProblem {
  MatmulOperand left;
  MatmulOperand right;
  void* out;
  bool out_is_float32;  // else of the kernel's element type
  bool out_is_aligned;  // a lane's neighbouring elements may be stored at once
  int32_t num_m;        // kRhsGradient only
  int32_t num_n;
  int32_t num_k;   // forward only
  int32_t tile_n;  // columns of the result in a tile: the kernel's, half of them if there are gates
  int32_t right_blocks;  // of columns side by side in a box of the right operand, see MatmulKernel
  GroupRows rows;
  EpilogueParams epilogue;
  int32_t tile_counter;  // of this launch alone, see TileClaims; negative: there is none
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_MATMUL_PROBLEM_H_
