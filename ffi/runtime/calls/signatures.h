// The operands and results of every custom call, in their order: the contract between the Python
// lowering and the handlers.
#ifndef JAX_EP_RUNTIME_CALLS_SIGNATURES_H_
#define JAX_EP_RUNTIME_CALLS_SIGNATURES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "ffi/runtime/calls/buffers.h"
#include "ffi/runtime/calls/config.h"
#include "ffi/runtime/calls/transfer_shape.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

inline constexpr char kDispatchTarget[] = "jax_ep.dispatch.v1";
inline constexpr char kRedispatchTarget[] = "jax_ep.redispatch.v1";
inline constexpr char kCombineTarget[] = "jax_ep.combine.v1";
inline constexpr char kDispatchStartTarget[] = "jax_ep.dispatch_start.v1";
inline constexpr char kRedispatchStartTarget[] = "jax_ep.redispatch_start.v1";
inline constexpr char kCombineStartTarget[] = "jax_ep.combine_start.v1";
inline constexpr char kTransferDoneTarget[] = "jax_ep.transfer_done.v1";
inline constexpr char kBulkCopyCeilingTarget[] = "jax_ep.bulk_copy_ceiling.v1";
inline constexpr char kGroupedMatmulTarget[] = "jax_ep.grouped_matmul.v1";
inline constexpr char kGroupedMatmulRhsGradientTarget[] = "jax_ep.grouped_matmul_rhs_gradient.v1";
inline constexpr char kGroupedMatmulQuantizedTarget[] = "jax_ep.grouped_matmul_quantized.v1";
inline constexpr char kGroupedMatmulMxFp4Target[] = "jax_ep.grouped_matmul_mxfp4.v1";
inline constexpr char kGroupedMatmulMxFp4LhsGradientTarget[] =
    "jax_ep.grouped_matmul_mxfp4_lhs_gradient.v1";
inline constexpr char kGroupedMatmulMxFp4ActivationTarget[] =
    "jax_ep.grouped_matmul_mxfp4_activation.v1";
inline constexpr char kGroupedMatmulQuantizedActivationTarget[] =
    "jax_ep.grouped_matmul_quantized_activation.v1";
inline constexpr char kGroupedMatmulQuantizedRhsGradientTarget[] =
    "jax_ep.grouped_matmul_quantized_rhs_gradient.v1";
inline constexpr char kGroupedMatmulActivationTarget[] = "jax_ep.grouped_matmul_activation.v1";
inline constexpr char kGroupedMatmulActivationGradientTarget[] =
    "jax_ep.grouped_matmul_activation_gradient.v1";
inline constexpr char kQuantizeTarget[] = "jax_ep.quantize.v1";
inline constexpr char kQuantizeWeightsTarget[] = "jax_ep.quantize_weights.v1";
inline constexpr char kQuantizeTransposedTarget[] = "jax_ep.quantize_transposed.v1";
inline constexpr char kQuantizeBothTarget[] = "jax_ep.quantize_both.v1";
inline constexpr char kQuantizeActivationGradientTarget[] =
    "jax_ep.quantize_activation_gradient.v1";

// The sizes that a launch needs, read from the shapes.
struct GroupedMatmulSizes {
  int64_t num_groups = 0;  // L
  int64_t num_rows = 0;    // M
  int64_t contracted = 0;  // K
  int64_t columns = 0;     // N
  ElementType lhs_type = kOther;
  ElementType rhs_type = kOther;     // rhs_gradient: the result's
  ElementType result_type = kOther;  // rhs_gradient: out_gradient's
};

struct QuantizeSizes {
  int64_t num_rows = 0;  // of all leading axes
  int64_t columns = 0;
  ElementType type = kOther;
};

struct QuantizeWeightsSizes {
  int64_t num_matrices = 0;  // the product of all leading axes
  int64_t rows = 0;
  std::vector<int64_t> columns;  // per operand
  int64_t total_columns = 0;
  ElementType type = kOther;
};

// Sizes of quantize_transposed, quantize_both and quantize_activation_gradient.
struct QuantizeTransposedSizes {
  int64_t num_rows = 0;
  int64_t columns = 0;
  int64_t row_blocks = 0;
  int64_t x_scales = 0;  // per row of quantized x
  ElementType type = kOther;
};

// A call without a launch.
struct NoSizes {};

using Buffers = std::span<const BufferView>;

// Elements of rows and matrices that are not quantized.
inline constexpr uint16_t kRowTypes = kBF16 | kF16 | kF32;

// A plan is the arrays of plan.h in their order, those of two levels last.
//
// x[T,H], [scales[T,S]], topk_ids[T,K], [topk_weights[T,K]]
//   -> rows[M,H], [row_scales[M,S]], [row_weights[M]], plan
// Quantized rows have scales: S is the blocks of H, or 1.
Status CheckDispatch(const TransferConfig& config, Buffers operands, Buffers results,
                     TransferShape* shape);

// x[T,H], [scales[T,S]], plan, [topk_weights[T,K]]
//   -> rows[M,H], [row_scales[M,S]], [row_weights[M]]
Status CheckRedispatch(const TransferConfig& config, Buffers operands, Buffers results,
                       TransferShape* shape);

// y[M,H], plan, [row_weights[M]], [row_scalars[M]] -> out[T,H], [assignment_scalars[T,K]]
Status CheckCombine(const TransferConfig& config, Buffers operands, Buffers results,
                    TransferShape* shape);

// The results and the operands of a start of these -> the first of its results, in the same memory
Status CheckTransferDone(const TransferDoneConfig& config, Buffers operands, Buffers results,
                         NoSizes* sizes);

// x[T,H] -> status[1]
Status CheckBulkCopyCeiling(const TransferConfig& config, Buffers operands, Buffers results,
                            TransferShape* shape);

// lhs[M,K], rhs[L,K,N] or [L,N,K], group_sizes[L] -> out[M,N]
Status CheckGroupedMatmul(const GroupedMatmulConfig& config, Buffers operands, Buffers results,
                          GroupedMatmulSizes* sizes);

// lhs[M,K], out_gradient[M,N], group_sizes[L], [accumulator] -> rhs gradient [L,K,N] or [L,N,K]
// The accumulator has the result's shape. Both are then float32, and one buffer.
Status CheckGroupedMatmulRhsGradient(const GroupedMatmulConfig& config, Buffers operands,
                                     Buffers results, GroupedMatmulSizes* sizes);

// lhs[M,K], lhs_scales[M,KB], rhs[L,N,K], rhs_scales[L,NB,KB], group_sizes[L] -> out[M,N]
// With blocks, KB and NB are the blocks of K and N. Otherwise KB is 1, and NB is N.
Status CheckGroupedMatmulQuantized(const GroupedMatmulQuantizedConfig& config, Buffers operands,
                                   Buffers results, GroupedMatmulSizes* sizes);

// lhs[M,K], rhs[L,N,K], rhs_scales[L,N,K/32], group_sizes[L] -> out[M,N]
Status CheckGroupedMatmulMxFp4(const GroupedMatmulMxFp4Config& config, Buffers operands,
                               Buffers results, GroupedMatmulSizes* sizes);

// out_gradient[M,N], rhs[L,N,K], rhs_scales[L,N,K/32], group_sizes[L] -> lhs_gradient[M,K]
// `sizes->contracted` is N, and `sizes->columns` K.
Status CheckGroupedMatmulMxFp4LhsGradient(const GroupedMatmulMxFp4Config& config, Buffers operands,
                                          Buffers results, GroupedMatmulSizes* sizes);

// lhs[M,K], rhs[L,N,K], rhs_scales[L,N,K/32], group_sizes[L], [bias[L,N]], [row_weights[M]]
//   -> out[M,F], [pre[M,N]]
// N is 2F for a gated activation, otherwise F. `sizes->columns` is F.
Status CheckGroupedMatmulMxFp4Activation(const GroupedMatmulMxFp4ActivationConfig& config,
                                         Buffers operands, Buffers results,
                                         GroupedMatmulSizes* sizes);

// lhs[M,K], lhs_scales[M,KB], rhs[L,2F,K], rhs_scales[L,2F/128,KB], group_sizes[L],
// [row_weights[M]] -> out[M,F], out_scales[M,F/128], [pre[M,2F]]
// KB are the blocks of K, and F is a multiple of 128. `sizes->columns` is F.
Status CheckGroupedMatmulQuantizedActivation(const GroupedMatmulQuantizedActivationConfig& config,
                                             Buffers operands, Buffers results,
                                             GroupedMatmulSizes* sizes);

// a[B,K,128], a_scales[B,K], b[B,N,128], b_scales[B,N/128], group_sizes[L], [accumulator]
//   -> rhs gradient [L,K,N]
// B are row blocks of 128, never of two groups. `sizes->num_rows` is 128 * B. The accumulator is as
// in CheckGroupedMatmulRhsGradient.
Status CheckGroupedMatmulQuantizedRhsGradient(const GroupedMatmulQuantizedRhsGradientConfig& config,
                                              Buffers operands, Buffers results,
                                              GroupedMatmulSizes* sizes);

// lhs[M,K], rhs[L,K,N], group_sizes[L], [bias[L,N]], [row_weights[M]] -> out[M,F], [pre[M,N]]
// N is 2F for a gated activation, otherwise F. `sizes->columns` is F.
Status CheckGroupedMatmulActivation(const GroupedMatmulActivationConfig& config, Buffers operands,
                                    Buffers results, GroupedMatmulSizes* sizes);

// out_gradient[M,K], rhs[L,F,K], group_sizes[L], pre[M,N], [row_weights[M]]
//   -> pre_gradient[M,N], activations[M,F], row_dots[M,F/128 rounded up]
Status CheckGroupedMatmulActivationGradient(const GroupedMatmulActivationConfig& config,
                                            Buffers operands, Buffers results,
                                            GroupedMatmulSizes* sizes);

// x[...,K] -> values[...,K], scales[...,S]
// S is the blocks of K, or 1. All arrays have the same leading axes.
Status CheckQuantize(const QuantizeConfig& config, Buffers operands, Buffers results,
                     QuantizeSizes* sizes);

// x[...,R,C0], x[...,R,C1], ... -> [values[...,R,C], scales], [values[...,C,R], scales]
// Quantizes the operands side by side: C is the sum of their columns. Only the last operand may
// have a partial block of columns. Scales have one number per block of values.
Status CheckQuantizeWeights(const QuantizeWeightsConfig& config, Buffers operands, Buffers results,
                            QuantizeWeightsSizes* sizes);

// x[M,C], [x_scales[M,X]], first_rows[B], num_rows[B] -> values[B,C,128], scales[B,S]
// S is C, or the blocks of C. X is 1, or the blocks of C.
Status CheckQuantizeTransposed(const QuantizeTransposedConfig& config, Buffers operands,
                               Buffers results, QuantizeTransposedSizes* sizes);

// x[M,C], first_rows[B], num_rows[B] -> row_values[M,C], row_scales[M,C/128], values[B,C,128],
// scales[B,S]
// S is C, or the blocks of C.
Status CheckQuantizeBoth(const QuantizeBothConfig& config, Buffers operands, Buffers results,
                         QuantizeTransposedSizes* sizes);

// activations_gradient[M,F], pre_activation[M,N], first_rows[B], num_rows[B], [row_weights[M]]
//   -> row_values[M,N], row_scales[M,N/128], values[B,N,128], scales[B,N/128],
//      activation_values[B,F,128], activation_scales[B,F], row_dots[M,F/128]
// N is 2F. `sizes->columns` is F.
Status CheckQuantizeActivationGradient(const QuantizeActivationGradientConfig& config,
                                       Buffers operands, Buffers results,
                                       QuantizeTransposedSizes* sizes);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_CALLS_SIGNATURES_H_
