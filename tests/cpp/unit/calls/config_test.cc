#include "ffi/runtime/calls/config.h"

#include <cmath>

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

TransferConfig TwoGroupsOfFour() {
  TransferConfig config;
  config.replica_groups = {0, 2, 4, 6, 1, 3, 5, 7};
  config.group_size = 4;
  config.num_experts = 256;
  config.row_align = 128;
  return config;
}

template <typename Change>
Status With(const Change& change) {
  TransferConfig config = TwoGroupsOfFour();
  change(config);
  return CheckConfig("jax_ep.dispatch.v1", config);
}

void TestValid() {
  CHECK_OK(With([](TransferConfig&) {}));
  CHECK_OK(With([](TransferConfig& c) { c.replica_groups = {0}, c.group_size = 1; }));
  CHECK_OK(With([](TransferConfig& c) { c.row_align = 1; }));
  CHECK_OK(With([](TransferConfig& c) { c.lane = 7, c.num_lanes = 8; }));
  CHECK_OK(With([](TransferConfig& c) { c.domain_size = 1; }));
  CHECK_OK(With([](TransferConfig& c) { c.domain_size = 2; }));
  CHECK_OK(CheckConfig("jax_ep.grouped_matmul.v1", GroupedMatmulConfig{}));
}

void TestGroups() {
  const std::vector<std::vector<int64_t>> expected = {{0, 2, 4, 6}, {1, 3, 5, 7}};
  CHECK(TwoGroupsOfFour().Groups() == expected);
  CHECK(TwoGroupsOfFour().experts_per_rank() == 64);
}

void TestActivations() {
  Activation activation = Activation::kNone;
  CHECK(ParseActivation("geglu", &activation) && activation == Activation::kGeglu);
  CHECK(IsGated(Activation::kSwiglu) && IsGated(Activation::kGeglu) && !IsGated(Activation::kSilu));
  CHECK(!ParseActivation("swish", &activation));
  const char target[] = "jax_ep.grouped_matmul_activation.v1";
  CHECK_OK(CheckConfig(target, GroupedMatmulActivationConfig{}));
  CHECK_FAILS(CheckConfig(target, GroupedMatmulActivationConfig{.keep_pre_activation = true}),
              "without an activation");
  CHECK_FAILS(CheckConfig(target, GroupedMatmulActivationConfig{.num_sms = -2}), "num_sms is -2");
}

void TestScaleBlocks() {
  const char target[] = "jax_ep.grouped_matmul_quantized.v1";
  CHECK_OK(CheckConfig(target, GroupedMatmulQuantizedConfig{}));
  CHECK_OK(CheckConfig(target, GroupedMatmulQuantizedConfig{.scale_block = 128}));
  CHECK_FAILS(CheckConfig(target, GroupedMatmulQuantizedConfig{.scale_block = 64}),
              "scale_block is 64; expected 128, or 0");
  CHECK_FAILS(CheckConfig(target, GroupedMatmulQuantizedConfig{.num_sms = -1}), "num_sms is -1");
}

void TestQuantizedActivations() {
  const char target[] = "jax_ep.grouped_matmul_quantized_activation.v1";
  GroupedMatmulQuantizedActivationConfig config{.activation = Activation::kGeglu};
  CHECK_OK(CheckConfig(target, config));
  config.num_sms = -1;
  CHECK_FAILS(CheckConfig(target, config), "num_sms is -1");
  CHECK_FAILS(
      CheckConfig(target, GroupedMatmulQuantizedActivationConfig{.activation = Activation::kSilu}),
      "not gated");
}

void TestLimits() {
  const char target[] = "jax_ep.grouped_matmul_mxfp4_activation.v1";
  const auto check = [&](Activation activation, float limit, float alpha) {
    return CheckConfig(target,
                       GroupedMatmulMxFp4ActivationConfig{
                           .epilogue = {.activation = activation}, .limit = limit, .alpha = alpha});
  };
  CHECK_OK(check(Activation::kNone, 0, 0));
  CHECK_OK(check(Activation::kGeglu, 0, 0));
  CHECK_OK(check(Activation::kSwiglu, 7, 1.702f));
  CHECK_FAILS(check(Activation::kGeglu, 7, 1), "limit for another activation than swiglu");
  CHECK_FAILS(check(Activation::kSwiglu, -7, 1), "limit is -7 and alpha is 1; expected positive");
  CHECK_FAILS(check(Activation::kSwiglu, 7, 0), "limit is 7 and alpha is 0; expected positive");
  CHECK_FAILS(check(Activation::kSwiglu, NAN, 1), "expected positive");
  CHECK_FAILS(CheckConfig(target, GroupedMatmulMxFp4ActivationConfig{.epilogue = {.num_sms = -1}}),
              "num_sms is -1");
}

void TestQuantize() {
  const char target[] = "jax_ep.quantize.v1";
  CHECK_OK(CheckConfig(target, QuantizeConfig{.scale_block = 128, .min_amax = 1e-4f}));
  CHECK_OK(CheckConfig(target, QuantizeConfig{.is_e5m2 = true, .min_amax = 1e-30f}));
  CHECK_FAILS(CheckConfig(target, QuantizeConfig{.scale_block = 32, .min_amax = 1}),
              "scale_block is 32; expected 128, or 0 for one scale per row");
  CHECK_FAILS(
      CheckConfig(target, QuantizeConfig{.scale_block = 128, .is_e5m2 = true, .min_amax = 1}),
      "is_e5m2 with blocks");
  CHECK_FAILS(CheckConfig(target, QuantizeConfig{}), "min_amax is 0; expected a positive number");
}

void TestQuantizeWeights() {
  const char target[] = "jax_ep.quantize_weights.v1";
  CHECK_OK(CheckConfig(target, QuantizeWeightsConfig{.as_given = true, .min_amax = 1e-4f}));
  CHECK_OK(CheckConfig(target, QuantizeWeightsConfig{.transposed = true, .min_amax = 1e-4f}));
  CHECK_FAILS(CheckConfig(target, QuantizeWeightsConfig{.min_amax = 1e-4f}),
              "neither as_given nor transposed; expected one layout, or both");
  CHECK_FAILS(CheckConfig(target, QuantizeWeightsConfig{.as_given = true}), "min_amax is 0");
}

void TestQuantizedGradients() {
  const char transposed[] = "jax_ep.quantize_transposed.v1";
  CHECK_OK(CheckConfig(transposed, QuantizeTransposedConfig{.min_amax = 1e-4f}));
  CHECK_FAILS(CheckConfig(transposed, QuantizeTransposedConfig{}), "min_amax is 0");
  const char both[] = "jax_ep.quantize_both.v1";
  CHECK_OK(CheckConfig(both, QuantizeBothConfig{.min_amax = 1e-4f}));
  CHECK_FAILS(CheckConfig(both, QuantizeBothConfig{}), "min_amax is 0");
  const char gradient[] = "jax_ep.quantize_activation_gradient.v1";
  QuantizeActivationGradientConfig config{
      .activation = Activation::kGeglu, .min_amax = 1e-30f, .activation_min_amax = 1e-4f};
  CHECK_OK(CheckConfig(gradient, config));
  config.activation_min_amax = 0;
  CHECK_FAILS(CheckConfig(gradient, config), "min_amax is 0");
  config.activation = Activation::kSilu;
  CHECK_FAILS(CheckConfig(gradient, config), "the activation is not gated");
  const char target[] = "jax_ep.grouped_matmul_quantized_rhs_gradient.v1";
  CHECK_OK(CheckConfig(target, GroupedMatmulQuantizedRhsGradientConfig{}));
  CHECK_FAILS(CheckConfig(target, GroupedMatmulQuantizedRhsGradientConfig{.num_sms = -1}),
              "num_sms is -1");
}

void TestRefused() {
  CHECK_FAILS(With([](TransferConfig& c) { c.group_size = 0; }), "group_size is 0");
  CHECK_FAILS(With([](TransferConfig& c) { c.group_size = -4; }), "group_size is -4");
  CHECK_FAILS(With([](TransferConfig& c) { c.group_size = 257; }), "1 to 256");
  CHECK_FAILS(With([](TransferConfig& c) { c.group_size = 3; }), "has 8 ids");
  CHECK_FAILS(With([](TransferConfig& c) { c.replica_groups.clear(); }), "has 0 ids");
  CHECK_FAILS(With([](TransferConfig& c) { c.replica_groups[3] = -1; }), "the id -1");
  CHECK_FAILS(With([](TransferConfig& c) { c.replica_groups[7] = 0; }), "the id 0 twice");
  CHECK_FAILS(With([](TransferConfig& c) { c.replica_groups[7] = 9; }), "every device of the mesh");
  CHECK_FAILS(With([](TransferConfig& c) { c.num_experts = 0; }), "num_experts is 0");
  CHECK_FAILS(With([](TransferConfig& c) { c.num_experts = 6; }),
              "multiple of the number of ranks");
  CHECK_FAILS(With([](TransferConfig& c) { c.row_align = 0; }), "row_align is 0");
  CHECK_FAILS(With([](TransferConfig& c) { c.num_sms = -1; }), "num_sms is -1");
  CHECK_FAILS(With([](TransferConfig& c) { c.num_lanes = 0; }), "num_lanes is 0");
  CHECK_FAILS(With([](TransferConfig& c) { c.num_lanes = 9; }), "num_lanes is 9");
  CHECK_FAILS(With([](TransferConfig& c) { c.lane = -1; }), "lane is -1; expected 0 to 0");
  CHECK_FAILS(With([](TransferConfig& c) { c.lane = 2, c.num_lanes = 2; }), "num_lanes is 2");
  for (const int64_t size : {-2, 3, 4, 8}) {
    CHECK_FAILS(With([&](TransferConfig& c) { c.domain_size = size; }),
                Concatenate("domain_size is ", size, "; expected the number of ranks per").c_str());
  }
  CHECK_FAILS(With([](TransferConfig& c) { c.row_align = 0; }), "jax_ep.dispatch.v1: ");
  CHECK_FAILS(CheckConfig("jax_ep.grouped_matmul.v1", GroupedMatmulConfig{.num_sms = -2}),
              "num_sms is -2");
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestValid();
  jax_ep::TestGroups();
  jax_ep::TestActivations();
  jax_ep::TestScaleBlocks();
  jax_ep::TestQuantizedActivations();
  jax_ep::TestLimits();
  jax_ep::TestQuantize();
  jax_ep::TestQuantizeWeights();
  jax_ep::TestQuantizedGradients();
  jax_ep::TestRefused();
  return jax_ep::testing::Finish();
}
