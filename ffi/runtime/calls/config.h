// The attributes of each custom call, and their checks. They are equal in all processes and on all
// devices.
#ifndef JAX_EP_RUNTIME_CALLS_CONFIG_H_
#define JAX_EP_RUNTIME_CALLS_CONFIG_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "ffi/device/common/limits.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// Lanes of the same devices. Each has control blocks and workspaces of its own.
inline constexpr int64_t kMaxLanes = 8;

// Attributes of dispatch, redispatch, combine and bulk_copy_ceiling.
struct TransferConfig {
  std::vector<int64_t> replica_groups;  // logical device ids, group after group
  int64_t group_size = 0;               // the number of ranks in a group
  int64_t num_experts = 0;              // the experts of all ranks of a group
  int64_t row_align = 1;                // every expert's rows are padded to a multiple of this
  int64_t num_sms = 0;                  // 0: the launch code chooses
  int64_t lane = 0;                     // calls of one lane follow each other
  int64_t num_lanes = 1;                // lanes that may be in flight at the same time
  int64_t domain_size = 0;              // ranks per NVLink domain; 0: one domain has all ranks
  bool zero_tail = true;                // rows past the last group are zeros, else unspecified
  bool has_weights = false;             // with the optional weight operand and result
  bool has_scalars = false;             // combine: with the optional scalar operand and result
  bool is_quantized = false;            // dispatch, redispatch: eight-bit rows and their scales
  int64_t repeats = 1;                  // bulk_copy_ceiling: how often the rows are sent

  int64_t experts_per_rank() const { return num_experts / group_size; }
  std::vector<std::vector<int64_t>> Groups() const;
};

// Attributes of transfer_done.
struct TransferDoneConfig {
  int64_t num_results = 0;  // the first ones of the start
};

// Attributes of grouped_matmul and grouped_matmul_rhs_gradient.
struct GroupedMatmulConfig {
  bool transpose_rhs = false;    // rhs, or its gradient, is [L,N,K] instead of [L,K,N]
  bool zero_tail = true;         // forward only
  bool has_accumulator = false;  // rhs_gradient only: adds to a float32 operand
  int64_t num_sms = 0;           // 0: the launch code chooses
};

// Values per scale along an axis that has blocks.
inline constexpr int64_t kScaleBlock = 128;

// Attributes of grouped_matmul_quantized.
struct GroupedMatmulQuantizedConfig {
  int64_t scale_block = 0;  // values that share a scale, along both axes; 0: a row, or a column
  bool zero_tail = true;
  int64_t num_sms = 0;  // 0: the launch code chooses
};

// Attributes of grouped_matmul_mxfp4 and grouped_matmul_mxfp4_lhs_gradient.
struct GroupedMatmulMxFp4Config {
  bool zero_tail = true;
  int64_t num_sms = 0;  // 0: the launch code chooses
};

// Attributes of grouped_matmul_quantized_rhs_gradient.
struct GroupedMatmulQuantizedRhsGradientConfig {
  bool has_accumulator = false;  // adds to a float32 operand
  int64_t num_sms = 0;           // 0: the launch code chooses
};

// Attributes of quantize.
struct QuantizeConfig {
  int64_t scale_block = 0;           // values of a row that share a scale; 0: all of them
  bool is_e5m2 = false;              // else E4M3; with blocks always E4M3
  float min_amax = 0;                // the least magnitude that a scale is made for
  bool power_of_two_scales = false;  // scales are rounded up to powers of two
};

// Attributes of quantize_weights. At least one layout is written.
struct QuantizeWeightsConfig {
  bool as_given = false;             // with results in the layout of x
  bool transposed = false;           // with results whose last two axes are exchanged
  float min_amax = 0;                // the least magnitude that a scale is made for
  bool power_of_two_scales = false;  // scales are rounded up to powers of two
};

// Attributes of quantize_transposed.
struct QuantizeTransposedConfig {
  bool is_quantized = false;         // x has E4M3 values, with an operand of scales
  bool per_column = false;           // a scale per column of a row block; else one per 128 columns
  bool zero_tail = false;            // also writes the row blocks past the last group
  float min_amax = 0;                // the least magnitude that a scale is made for
  bool power_of_two_scales = false;  // scales are rounded up to powers of two
};

// Attributes of quantize_both.
struct QuantizeBothConfig {
  bool per_column = false;           // a scale per column of a row block; else one per 128 columns
  float min_amax = 0;                // the least magnitude that a scale is made for
  bool power_of_two_scales = false;  // scales are rounded up to powers of two
};

enum class Activation { kNone, kRelu, kRelu2, kSilu, kGelu, kSwiglu, kGeglu };

// Whether the second half of the columns multiplies the activation of the first half.
constexpr bool IsGated(Activation activation) {
  return activation == Activation::kSwiglu || activation == Activation::kGeglu;
}

// Returns false if no activation has that name.
bool ParseActivation(std::string_view name, Activation* activation);

// Attributes of quantize_activation_gradient.
struct QuantizeActivationGradientConfig {
  Activation activation = Activation::kNone;    // gated
  bool has_row_weights = false;                 // with a row_weights operand
  float min_amax = 0;                           // the least magnitude that a scale is made for
  bool power_of_two_scales = false;             // scales are rounded up to powers of two
  float activation_min_amax = 0;                // the same of the activations
  bool activation_power_of_two_scales = false;  // likewise
};

// Attributes of grouped_matmul_activation and grouped_matmul_activation_gradient.
struct GroupedMatmulActivationConfig {
  Activation activation = Activation::kNone;
  bool has_bias = false;             // forward only: with a bias operand
  bool has_row_weights = false;      // with a row_weights operand
  bool keep_pre_activation = false;  // forward only: with a pre_activation result
  int64_t num_sms = 0;               // 0: the launch code chooses
};

// Attributes of grouped_matmul_quantized_activation.
struct GroupedMatmulQuantizedActivationConfig {
  Activation activation = Activation::kNone;
  bool has_row_weights = false;      // with a row_weights operand
  bool keep_pre_activation = false;  // with a pre_activation result
  bool power_of_two_scales = false;  // scales of results are rounded up to powers of two
  int64_t num_sms = 0;               // 0: the launch code chooses
};

// Attributes of grouped_matmul_mxfp4_activation: those of grouped_matmul_activation, and `limit`.
struct GroupedMatmulMxFp4ActivationConfig {
  GroupedMatmulActivationConfig epilogue;
  float limit = 0;  // 0: none. swiglu: min(gate, limit) * sigmoid(alpha * it) * (up between -limit
  float alpha = 0;  // and limit, plus 1)
};

// `target` is the custom call's name, for the message.
Status CheckConfig(std::string_view target, const TransferConfig& config);
Status CheckConfig(std::string_view target, const TransferDoneConfig& config);
Status CheckConfig(std::string_view target, const GroupedMatmulConfig& config);
Status CheckConfig(std::string_view target, const GroupedMatmulQuantizedConfig& config);
Status CheckConfig(std::string_view target, const GroupedMatmulMxFp4Config& config);
Status CheckConfig(std::string_view target, const GroupedMatmulQuantizedRhsGradientConfig& config);
Status CheckConfig(std::string_view target, const GroupedMatmulActivationConfig& config);
Status CheckConfig(std::string_view target, const GroupedMatmulQuantizedActivationConfig& config);
Status CheckConfig(std::string_view target, const GroupedMatmulMxFp4ActivationConfig& config);
Status CheckConfig(std::string_view target, const QuantizeConfig& config);
Status CheckConfig(std::string_view target, const QuantizeWeightsConfig& config);
Status CheckConfig(std::string_view target, const QuantizeTransposedConfig& config);
Status CheckConfig(std::string_view target, const QuantizeBothConfig& config);
Status CheckConfig(std::string_view target, const QuantizeActivationGradientConfig& config);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_CALLS_CONFIG_H_
