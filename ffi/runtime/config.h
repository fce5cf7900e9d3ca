// What the attributes of a call say, and whether they make sense. The attributes are equal on all
// processes; nothing in them depends on the process or the device.
#ifndef JAX_EP_RUNTIME_CONFIG_H_
#define JAX_EP_RUNTIME_CONFIG_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "ffi/device/common/limits.h"
#include "ffi/runtime/status.h"

namespace jax_ep {

// dispatch, dispatch_by_plan, combine, and ceiling.
struct TransferConfig {
  std::vector<int64_t> replica_groups;  // logical ids of the ranks, group after group
  int64_t group_size = 0;               // ranks of one group
  int64_t num_experts = 0;              // of all ranks of a group
  int64_t row_align = 1;                // every expert's rows are padded to a multiple of this
  int64_t num_sms = 0;                  // 0: chosen by the launch
  bool zero_tail = true;                // rows past the last group are zeros, else unspecified
  bool has_weights = false;             // the optional weight operand and result are there
  bool has_scalars = false;             // combine: the optional scalar operand and result are there
  int64_t repeats = 1;                  // ceiling: how often the rows are sent

  int64_t experts_per_rank() const { return num_experts / group_size; }
  std::vector<std::vector<int64_t>> Groups() const;
};

// grouped_matmul and grouped_matmul_rhs_gradient.
struct GroupedMatmulConfig {
  bool transpose_rhs = false;  // rhs, or its gradient, is [L,N,K] instead of [L,K,N]
  bool zero_tail = true;       // forward only
  int64_t num_sms = 0;         // 0: chosen by the launch
};

enum class Activation { kNone, kRelu, kRelu2, kSilu, kGelu, kSwiglu, kGeglu };

// Whether half of the columns multiply what the activation makes of the other half.
constexpr bool IsGated(Activation activation) {
  return activation == Activation::kSwiglu || activation == Activation::kGeglu;
}

// The attribute of that name. False: there is none.
bool ParseActivation(std::string_view name, Activation* activation);

// grouped_matmul_activation and grouped_matmul_activation_gradient.
struct GroupedMatmulActivationConfig {
  Activation activation = Activation::kNone;
  bool has_bias = false;             // forward only: the operand is there
  bool has_row_weights = false;      // the operand is there
  bool keep_pre_activation = false;  // forward only: the result is there
  int64_t num_sms = 0;               // 0: chosen by the launch
};

// `target` is the name of the custom call, for the message.
Status CheckConfig(std::string_view target, const TransferConfig& config);
Status CheckConfig(std::string_view target, const GroupedMatmulConfig& config);
Status CheckConfig(std::string_view target, const GroupedMatmulActivationConfig& config);

}  // namespace jax_ep

#endif  // JAX_EP_RUNTIME_CONFIG_H_
