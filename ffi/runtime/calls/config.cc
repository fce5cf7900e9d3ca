#include "ffi/runtime/calls/config.h"

#include <algorithm>

namespace jax_ep {
namespace {

Status CheckNumSms(std::string_view target, int64_t num_sms) {
  if (num_sms < 0) {
    return InvalidArgument(target, ": num_sms is ", num_sms,
                           "; expected a number of SMs, or 0 to let the launch code choose");
  }
  return {};
}

Status CheckLane(std::string_view target, const TransferConfig& config) {
  if (config.num_lanes < 1 || config.num_lanes > kMaxLanes) {
    return InvalidArgument(target, ": num_lanes is ", config.num_lanes,
                           "; expected the number of lanes in flight at the same time, 1 to ",
                           kMaxLanes);
  }
  if (config.lane < 0 || config.lane >= config.num_lanes) {
    return InvalidArgument(target, ": lane is ", config.lane, "; expected 0 to ",
                           config.num_lanes - 1, ", because num_lanes is ", config.num_lanes);
  }
  return {};
}

Status CheckDomainSize(std::string_view target, const TransferConfig& config) {
  if (config.domain_size == 0) return {};
  if (config.domain_size > 0 && config.domain_size < config.group_size &&
      config.group_size % config.domain_size == 0) {
    return {};
  }
  return InvalidArgument(target, ": domain_size is ", config.domain_size,
                         "; expected the number of ranks per NVLink domain, a divisor of the ",
                         config.group_size, " ranks and less than them, or no such attribute");
}

Status CheckScaleBlock(std::string_view target, int64_t scale_block) {
  if (scale_block == 0 || scale_block == kScaleBlock) return {};
  return InvalidArgument(target, ": scale_block is ", scale_block, "; expected ", kScaleBlock,
                         ", or 0 for one scale per row or column");
}

Status CheckGated(std::string_view target, Activation activation) {
  if (IsGated(activation)) return {};
  return InvalidArgument(target, ": the activation is not gated; expected a gated one");
}

Status CheckMinAmax(std::string_view target, float min_amax) {
  if (min_amax > 0) return {};
  return InvalidArgument(target, ": min_amax is ", min_amax,
                         "; expected a positive number, since a scale divides");
}

Status CheckReplicaGroups(std::string_view target, const TransferConfig& config) {
  const auto num_ids = static_cast<int64_t>(config.replica_groups.size());
  if (config.group_size < 1 || config.group_size > kMaxRanks) {
    return InvalidArgument(target, ": group_size is ", config.group_size,
                           "; expected the number of ranks of the expert axis, 1 to ", kMaxRanks);
  }
  if (num_ids == 0 || num_ids % config.group_size != 0) {
    return InvalidArgument(target, ": replica_groups has ", num_ids,
                           " ids; expected a positive multiple of group_size, which is ",
                           config.group_size);
  }
  std::vector<int64_t> ids = config.replica_groups;
  std::sort(ids.begin(), ids.end());
  if (ids.front() < 0) {
    return InvalidArgument(target, ": replica_groups holds the id ", ids.front(),
                           "; expected logical device ids, which start at 0");
  }
  if (auto twice = std::adjacent_find(ids.begin(), ids.end()); twice != ids.end()) {
    return InvalidArgument(target, ": replica_groups holds the id ", *twice,
                           " twice; expected every device in one group only");
  }
  // A device without a rank would fail alone, which ends the process.
  if (ids.back() >= num_ids) {
    return InvalidArgument(target, ": replica_groups holds the id ", ids.back(), " but only ",
                           num_ids, " ids; expected every device of the mesh, 0 to ", ids.back());
  }
  return {};
}

}  // namespace

std::vector<std::vector<int64_t>> TransferConfig::Groups() const {
  std::vector<std::vector<int64_t>> groups;
  for (auto first = replica_groups.begin(); first != replica_groups.end(); first += group_size) {
    groups.emplace_back(first, first + group_size);
  }
  return groups;
}

Status CheckConfig(std::string_view target, const TransferConfig& config) {
  if (Status status = CheckReplicaGroups(target, config); !status.ok()) return status;
  if (Status status = CheckLane(target, config); !status.ok()) return status;
  if (Status status = CheckDomainSize(target, config); !status.ok()) return status;
  if (config.num_experts < 1 || config.num_experts % config.group_size != 0) {
    return InvalidArgument(target, ": num_experts is ", config.num_experts,
                           "; expected a positive multiple of the number of ranks, which is ",
                           config.group_size);
  }
  if (config.row_align < 1) {
    return InvalidArgument(target, ": row_align is ", config.row_align,
                           "; expected 1 (no padding) or more");
  }
  return CheckNumSms(target, config.num_sms);
}

Status CheckConfig(std::string_view target, const TransferDoneConfig& config) {
  if (config.num_results > 0) return {};
  return InvalidArgument(target, ": num_results is ", config.num_results,
                         "; expected how many of the start's results are returned");
}

Status CheckConfig(std::string_view target, const GroupedMatmulConfig& config) {
  return CheckNumSms(target, config.num_sms);
}

Status CheckConfig(std::string_view target, const GroupedMatmulQuantizedConfig& config) {
  Status status = CheckScaleBlock(target, config.scale_block);
  return status.ok() ? CheckNumSms(target, config.num_sms) : status;
}

Status CheckConfig(std::string_view target, const GroupedMatmulMxFp4Config& config) {
  return CheckNumSms(target, config.num_sms);
}

Status CheckConfig(std::string_view target, const GroupedMatmulQuantizedRhsGradientConfig& config) {
  return CheckNumSms(target, config.num_sms);
}

Status CheckConfig(std::string_view target, const GroupedMatmulActivationConfig& config) {
  if (config.keep_pre_activation && config.activation == Activation::kNone) {
    return InvalidArgument(target, ": keep_pre_activation without an activation; expected one");
  }
  return CheckNumSms(target, config.num_sms);
}

Status CheckConfig(std::string_view target, const GroupedMatmulQuantizedActivationConfig& config) {
  Status status = CheckGated(target, config.activation);
  return status.ok() ? CheckNumSms(target, config.num_sms) : status;
}

Status CheckConfig(std::string_view target, const GroupedMatmulMxFp4ActivationConfig& config) {
  const bool has_limit = config.limit != 0;
  if (has_limit && config.epilogue.activation != Activation::kSwiglu) {
    return InvalidArgument(target, ": there is a limit for another activation than swiglu; ",
                           "expected 0 for it");
  }
  if (has_limit && !(config.limit > 0 && config.alpha > 0)) {
    return InvalidArgument(target, ": limit is ", config.limit, " and alpha is ", config.alpha,
                           "; expected positive numbers");
  }
  return CheckConfig(target, config.epilogue);
}

Status CheckConfig(std::string_view target, const QuantizeConfig& config) {
  Status status = CheckScaleBlock(target, config.scale_block);
  if (!status.ok()) return status;
  if (config.scale_block > 0 && config.is_e5m2) {
    return InvalidArgument(target, ": is_e5m2 with blocks; expected E4M3, which all blocks have");
  }
  return CheckMinAmax(target, config.min_amax);
}

Status CheckConfig(std::string_view target, const QuantizeWeightsConfig& config) {
  if (!config.as_given && !config.transposed) {
    return InvalidArgument(target,
                           ": neither as_given nor transposed; expected one layout, or both");
  }
  return CheckMinAmax(target, config.min_amax);
}

Status CheckConfig(std::string_view target, const QuantizeTransposedConfig& config) {
  return CheckMinAmax(target, config.min_amax);
}

Status CheckConfig(std::string_view target, const QuantizeBothConfig& config) {
  return CheckMinAmax(target, config.min_amax);
}

Status CheckConfig(std::string_view target, const QuantizeActivationGradientConfig& config) {
  Status status = CheckGated(target, config.activation);
  if (status.ok()) status = CheckMinAmax(target, config.min_amax);
  return status.ok() ? CheckMinAmax(target, config.activation_min_amax) : status;
}

bool ParseActivation(std::string_view name, Activation* activation) {
  static constexpr struct {
    std::string_view name;
    Activation activation;
  } kNamed[] = {{"none", Activation::kNone},   {"relu", Activation::kRelu},
                {"relu2", Activation::kRelu2}, {"silu", Activation::kSilu},
                {"gelu", Activation::kGelu},   {"swiglu", Activation::kSwiglu},
                {"geglu", Activation::kGeglu}};
  for (const auto& named : kNamed) {
    if (named.name != name) continue;
    *activation = named.activation;
    return true;
  }
  return false;
}

}  // namespace jax_ep
