#include "ffi/runtime/signatures.h"

#include <vector>

#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

struct OwnedBuffer {
  ElementType type;
  std::vector<int64_t> dims;
};

using List = std::vector<OwnedBuffer>;

std::vector<BufferView> Views(const List& buffers) {
  std::vector<BufferView> views;
  for (const OwnedBuffer& buffer : buffers) views.push_back({buffer.type, buffer.dims});
  return views;
}

List operator+(List left, const List& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

// 4 ranks with 2 experts each, 16 tokens of 64 elements, top-k 3, 40 rows.
TransferConfig Config(bool has_weights, bool has_scalars = false) {
  TransferConfig config;
  config.replica_groups = {0, 1, 2, 3};
  config.group_size = 4;
  config.num_experts = 8;
  config.has_weights = has_weights;
  config.has_scalars = has_scalars;
  return config;
}

const OwnedBuffer kTokens{kBF16, {16, 64}};
const OwnedBuffer kRows{kBF16, {40, 64}};
const OwnedBuffer kIds{kS32, {16, 3}};
const OwnedBuffer kChoiceValues{kF32, {16, 3}};
const OwnedBuffer kRowValues{kF32, {40}};
const List kPlan = {{kS32, {2}},  {kS32, {2}},      {kS32, {3}},     {kS32, {40, 3}},
                    {kS32, {40}}, {kPred, {16, 3}}, {kS32, {16, 3}}, {kS32, {1}},
                    {kS32, {1}},  {kS32, {1}},      {kS32, {1}}};

template <typename Check, typename Config, typename Sizes>
Status Run(const Check& check, const Config& config, const List& operands, const List& results,
           Sizes* sizes) {
  return check(config, Views(operands), Views(results), sizes);
}

void TestDispatch() {
  TransferShape sizes;
  CHECK_OK(Run(CheckDispatch, Config(false), {kTokens, kIds}, List{kRows} + kPlan, &sizes));
  CHECK(sizes.num_tokens == 16 && sizes.hidden == 64 && sizes.top_k == 3);
  CHECK(sizes.num_rows == 40 && sizes.format == kBFloat16Rows);
  CHECK_OK(Run(CheckDispatch, Config(true), {kTokens, kIds, kChoiceValues},
               List{kRows, kRowValues} + kPlan, &sizes));
}

void TestQuantizedRows() {
  TransferConfig config = Config(true);
  config.is_quantized = true;
  TransferShape sizes;
  const OwnedBuffer tokens{kF8E4M3, {16, 272}}, rows{kF8E4M3, {40, 272}};
  const auto dispatch = [&](const OwnedBuffer& x, int64_t scales, int64_t row_scales) {
    return Run(CheckDispatch, config, {x, {kF32, {16, scales}}, kIds, kChoiceValues},
               List{rows, {kF32, {40, row_scales}}, kRowValues} + kPlan, &sizes);
  };
  CHECK_OK(dispatch(tokens, 3, 3));
  CHECK(sizes.format == QuantizedRowFormat(kF8E4M3, 128) && sizes.num_scales() == 3);
  CHECK(sizes.operand_bytes() == 272 && sizes.wire_bytes() == 288 && sizes.result_bytes() == 272);
  CHECK_OK(dispatch(tokens, 1, 1));
  CHECK(IsQuantized(sizes.format) && sizes.num_scales() == 1);
  CHECK_FAILS(dispatch(tokens, 2, 2), "a row of 272 values has 2 scales; expected one, or 3 for");
  CHECK_FAILS(dispatch(tokens, 3, 1), "(row_scales) is f32[40,1]; expected f32[M=40,S=3]");
  CHECK_FAILS(dispatch(kTokens, 1, 1), "(x) is bf16[16,64]; expected f8e4m3fn|f8e5m2[T,H]");
  CHECK_OK(Run(CheckRedispatch, config, List{tokens, {kF32, {16, 3}}} + kPlan + List{kChoiceValues},
               {rows, {kF32, {40, 3}}, kRowValues}, &sizes));
  CHECK(sizes.num_scales() == 3 && sizes.top_k == 3);
}

void TestDispatchRefused() {
  const auto fails = [](const List& operands, const List& results) {
    TransferShape sizes;
    return Run(CheckDispatch, Config(false), operands, results, &sizes);
  };
  CHECK_FAILS(fails({kTokens}, {}), "operand 1 (topk_ids) is missing");
  CHECK_FAILS(fails({kTokens, {kS32, {16}}}, {}), "(topk_ids) is s32[16]; expected s32[T=16,K]");
  CHECK_FAILS(fails({kTokens, {kS32, {15, 3}}}, {}), "is s32[15,3]; expected s32[T=16,K]");
  CHECK_FAILS(fails({kTokens, {kOther, {16, 3}}}, {}), "another type[16,3]");
  CHECK_FAILS(fails({{kS32, {16, 64}}, kIds}, {}),
              "operand 0 (x) is s32[16,64]; expected f16|bf16|f32");
  CHECK_FAILS(fails({kTokens, kIds}, List{{kF32, {40, 64}}} + kPlan), "expected bf16[M,H=64]");
  CHECK_FAILS(fails({kTokens, kIds, kChoiceValues}, List{kRows} + kPlan), "3 operands are given");
  List plan = kPlan;
  plan[2].dims = {2};
  CHECK_FAILS(fails({kTokens, kIds}, List{kRows} + plan), "(plan.row_offsets) is s32[2]");
  plan = kPlan;
  plan[4].dims = {41};
  CHECK_FAILS(fails({kTokens, kIds}, List{kRows} + plan), "(plan.partial_sum_index) is s32[41]");
  plan = kPlan;
  plan[5].type = kS32;
  CHECK_FAILS(fails({kTokens, kIds}, List{kRows} + plan), "(plan.kept) is s32[16,3]");
  plan = kPlan;
  plan[6].type = kPred;
  CHECK_FAILS(fails({kTokens, kIds}, List{kRows} + plan), "(plan.destination) is pred[16,3]");
  plan = kPlan;
  plan.pop_back();
  CHECK_FAILS(fails({kTokens, kIds}, List{kRows} + plan), "(plan.status) is missing");
  CHECK_FAILS(fails({{kBF16, {16, 60}}, kIds}, List{{kBF16, {40, 60}}} + kPlan), "multiples of 16");
}

void TestRedispatch() {
  TransferShape sizes;
  CHECK_OK(Run(CheckRedispatch, Config(false), List{kTokens} + kPlan, {kRows}, &sizes));
  CHECK(sizes.num_rows == 40 && sizes.top_k == 3);
  CHECK_OK(Run(CheckRedispatch, Config(true), List{kTokens} + kPlan + List{kChoiceValues},
               {kRows, kRowValues}, &sizes));
  CHECK_FAILS(Run(CheckRedispatch, Config(true), List{kTokens} + kPlan, {kRows}, &sizes),
              "operand 12 (topk_weights) is missing");
}

void TestCombine() {
  TransferShape sizes;
  CHECK_OK(Run(CheckCombine, Config(false), List{kRows} + kPlan, {kTokens}, &sizes));
  CHECK_OK(
      Run(CheckCombine, Config(true), List{kRows} + kPlan + List{kRowValues}, {kTokens}, &sizes));
  CHECK_OK(Run(CheckCombine, Config(true, true), List{kRows} + kPlan + List{kRowValues, kRowValues},
               {kTokens, kChoiceValues}, &sizes));
  CHECK(sizes.num_tokens == 16 && sizes.hidden == 64 && sizes.num_rows == 40);
  CHECK_FAILS(Run(CheckCombine, Config(false, true), List{kRows} + kPlan + List{kRowValues},
                  {kTokens}, &sizes),
              "result 1 (assignment_scalars) is missing");
  CHECK_FAILS(Run(CheckCombine, Config(false), List{kRows} + kPlan, {{kBF16, {16, 32}}}, &sizes),
              "(out) is bf16[16,32]; expected bf16[T=16,H=64]");
}

void TestGroupedMatmul() {
  const List operands = {{kBF16, {40, 64}}, {kF32, {2, 64, 32}}, {kS32, {2}}};
  GroupedMatmulSizes sizes;
  CHECK_OK(Run(CheckGroupedMatmul, GroupedMatmulConfig{}, operands, {{kBF16, {40, 32}}}, &sizes));
  CHECK(sizes.num_groups == 2 && sizes.num_rows == 40 && sizes.contracted == 64);
  CHECK(sizes.columns == 32 && sizes.lhs_type == kBF16 && sizes.rhs_type == kF32);
  CHECK_FAILS(Run(CheckGroupedMatmul, GroupedMatmulConfig{.transpose_rhs = true}, operands,
                  {{kBF16, {40, 32}}}, &sizes),
              "(rhs) is f32[2,64,32]; expected f16|bf16|f32[L,N,K=64]");
  CHECK_FAILS(Run(CheckGroupedMatmul, GroupedMatmulConfig{},
                  {operands[0], operands[1], {kS32, {3}}}, {{kBF16, {40, 32}}}, &sizes),
              "(group_sizes) is s32[3]; expected s32[L=2]");
}

void TestGroupedMatmulRhsGradient() {
  const List operands = {{kBF16, {40, 64}}, {kBF16, {40, 32}}, {kS32, {2}}};
  GroupedMatmulSizes sizes;
  CHECK_OK(Run(CheckGroupedMatmulRhsGradient, GroupedMatmulConfig{}, operands,
               {{kF32, {2, 64, 32}}}, &sizes));
  CHECK(sizes.columns == 32 && sizes.rhs_type == kF32 && sizes.result_type == kBF16);
  CHECK_OK(Run(CheckGroupedMatmulRhsGradient, GroupedMatmulConfig{.transpose_rhs = true}, operands,
               {{kF32, {2, 32, 64}}}, &sizes));
  CHECK_FAILS(Run(CheckGroupedMatmulRhsGradient, GroupedMatmulConfig{}, operands,
                  {{kF32, {2, 32, 64}}}, &sizes),
              "(rhs_gradient) is f32[2,32,64]");
}

void TestAccumulator() {
  const List rows = {{kBF16, {40, 64}}, {kBF16, {40, 32}}, {kS32, {2}}};
  const GroupedMatmulConfig config{.has_accumulator = true};
  const auto check = [&](const OwnedBuffer& accumulator, const OwnedBuffer& result) {
    GroupedMatmulSizes sizes;
    return Run(CheckGroupedMatmulRhsGradient, config, rows + List{accumulator}, {result}, &sizes);
  };
  const OwnedBuffer matrices{kF32, {2, 64, 32}};
  CHECK_OK(check(matrices, matrices));
  CHECK_FAILS(check({kF32, {2, 32, 64}}, matrices),
              "operand 3 (accumulator) is f32[2,32,64]; expected f32[L=2,K=64,N=32]");
  CHECK_FAILS(check({kBF16, {2, 64, 32}}, {kBF16, {2, 64, 32}}),
              "(accumulator) is bf16[2,64,32]; expected f32[");
  CHECK_FAILS(check(matrices, {kBF16, {2, 64, 32}}), "(rhs_gradient) is bf16[2,64,32]");
  GroupedMatmulSizes sizes;
  CHECK_FAILS(Run(CheckGroupedMatmulRhsGradient, config, rows, {matrices}, &sizes),
              "operand 3 (accumulator) is missing");
  CHECK_FAILS(Run(CheckGroupedMatmulRhsGradient, GroupedMatmulConfig{}, rows + List{matrices},
                  {matrices}, &sizes),
              "4 operands are given; expected 3");
  const GroupedMatmulConfig transposed{.transpose_rhs = true, .has_accumulator = true};
  const OwnedBuffer swapped{kF32, {2, 32, 64}};
  CHECK_OK(Run(CheckGroupedMatmulRhsGradient, transposed, rows + List{swapped}, {swapped}, &sizes));
}

void TestGroupedMatmulQuantized() {
  const GroupedMatmulQuantizedConfig blocks{.scale_block = 128}, rows;
  GroupedMatmulSizes sizes;
  const List results = {{kBF16, {40, 136}}};
  const List blocked = {{kF8E4M3, {40, 144}},
                        {kF32, {40, 2}},
                        {kF8E4M3, {3, 136, 144}},
                        {kF32, {3, 2, 2}},
                        {kS32, {3}}};
  CHECK_OK(Run(CheckGroupedMatmulQuantized, blocks, blocked, results, &sizes));
  CHECK(sizes.num_groups == 3 && sizes.num_rows == 40);
  CHECK(sizes.contracted == 144 && sizes.columns == 136 && sizes.result_type == kBF16);
  const auto refused = [&](const GroupedMatmulQuantizedConfig& config, size_t index,
                           const OwnedBuffer& operand, const char* message) {
    List operands = blocked;
    operands[index] = operand;
    CHECK_FAILS(Run(CheckGroupedMatmulQuantized, config, operands, results, &sizes), message);
  };
  refused(blocks, 0, {kF8E5M2, {40, 144}}, "(lhs) is f8e5m2[40,144]; expected f8e4m3fn[M,K]");
  refused(blocks, 1, {kF32, {40, 1}}, "(lhs_scales) is f32[40,1]; expected f32[M=40,K/128=2]");
  refused(blocks, 2, {kF8E5M2, {3, 136, 144}}, "(rhs) is f8e5m2[3,136,144]; expected f8e4m3fn");
  refused(blocks, 3, {kF32, {3, 136, 1}}, "expected f32[L=3,N/128=2,K/128=2]");
  refused(rows, 0, {kF8E5M2, {40, 144}}, "(lhs_scales) is f32[40,2]; expected f32[M=40,1=1]");
  const List by_row = {{kF8E5M2, {40, 144}},
                       {kF32, {40, 1}},
                       {kF8E4M3, {3, 136, 144}},
                       {kF32, {3, 136, 1}},
                       {kS32, {3}}};
  CHECK_OK(Run(CheckGroupedMatmulQuantized, rows, by_row, results, &sizes));
  CHECK(sizes.lhs_type == kF8E5M2);
  CHECK_FAILS(Run(CheckGroupedMatmulQuantized, rows, by_row, {{kF16, {40, 136}}}, &sizes),
              "(out) is f16[40,136]; expected bf16|f32");
}

void TestGroupedMatmulQuantizedActivation() {
  GroupedMatmulQuantizedActivationConfig config{.activation = Activation::kSwiglu};
  config.has_row_weights = config.keep_pre_activation = true;
  const List operands = {{kF8E4M3, {40, 144}}, {kF32, {40, 2}}, {kF8E4M3, {3, 512, 144}},
                         {kF32, {3, 4, 2}},    {kS32, {3}},     {kF32, {40}}};
  const List results = {{kF8E4M3, {40, 256}}, {kF32, {40, 2}}, {kBF16, {40, 512}}};
  GroupedMatmulSizes sizes;
  const auto check = [&](const List& operands, const List& results) {
    return Run(CheckGroupedMatmulQuantizedActivation, config, operands, results, &sizes);
  };
  CHECK_OK(check(operands, results));
  CHECK(sizes.num_groups == 3 && sizes.num_rows == 40);
  CHECK(sizes.contracted == 144 && sizes.columns == 256);
  const auto refused = [&](size_t index, const OwnedBuffer& result, const char* message) {
    List others = results;
    others[index] = result;
    CHECK_FAILS(check(operands, others), message);
  };
  refused(0, {kF8E4M3, {40, 512}}, "(out) is f8e4m3fn[40,512]; expected f8e4m3fn[M=40,F=256]");
  refused(1, {kF32, {40, 1}}, "(out_scales) is f32[40,1]; expected f32[M=40,F/128=2]");
  refused(2, {kF32, {40, 512}}, "(pre_activation) is f32[40,512]; expected bf16[M=40,2F=512]");
  List narrow = operands;
  narrow[2] = {kF8E4M3, {3, 192, 144}};
  narrow[3] = {kF32, {3, 2, 2}};
  CHECK_FAILS(check(narrow, {{kF8E4M3, {40, 96}}, {kF32, {40, 1}}, {kBF16, {40, 192}}}),
              "2F is 192; expected a multiple of 256");
}

void TestQuantize() {
  QuantizeConfig config{.scale_block = 128};
  const List x = {{kBF16, {2, 20, 144}}};
  QuantizeSizes sizes;
  const List blocked = {{kF8E4M3, {2, 20, 144}}, {kF32, {2, 20, 2}}};
  CHECK_OK(Run(CheckQuantize, config, x, blocked, &sizes));
  CHECK(sizes.num_rows == 40 && sizes.columns == 144 && sizes.type == kBF16);
  CHECK_OK(Run(CheckQuantize, config, {{kF32, {144}}}, {{kF8E4M3, {144}}, {kF32, {2}}}, &sizes));
  CHECK(sizes.num_rows == 1 && sizes.type == kF32);
  CHECK_FAILS(Run(CheckQuantize, config, x, {{kF8E5M2, {40, 144}}, {kF32, {40, 2}}}, &sizes),
              "(values) is f8e5m2[40,144]; expected f8e4m3fn[M=40,K=144]");
  CHECK_FAILS(Run(CheckQuantize, config, x, {{kF8E4M3, {40, 144}}, {kF32, {40, 1}}}, &sizes),
              "(scales) is f32[40,1]; expected f32[M=40,S=2]");
  CHECK_FAILS(Run(CheckQuantize, config, {}, blocked, &sizes), "operand");
  config.scale_block = 0;
  config.is_e5m2 = true;
  const List by_row = {{kF8E5M2, {40, 144}}, {kF32, {40, 1}}};
  CHECK_OK(Run(CheckQuantize, config, x, by_row, &sizes));
}

void TestQuantizeWeights() {
  QuantizeWeightsConfig config{.as_given = true, .transposed = true};
  const List x = {{kBF16, {2, 3, 144, 256}}, {kBF16, {2, 3, 144, 40}}};
  const OwnedBuffer values{kF8E4M3, {2, 3, 144, 296}}, scales{kF32, {2, 3, 2, 3}};
  const OwnedBuffer mirrored{kF8E4M3, {2, 3, 296, 144}}, mirrored_scales{kF32, {2, 3, 3, 2}};
  QuantizeWeightsSizes sizes;
  const auto check = [&](const List& operands, const List& results) {
    return Run(CheckQuantizeWeights, config, operands, results, &sizes);
  };
  CHECK_OK(check(x, {values, scales, mirrored, mirrored_scales}));
  CHECK(sizes.num_matrices == 6 && sizes.rows == 144 && sizes.total_columns == 296);
  CHECK((sizes.columns == std::vector<int64_t>{256, 40}) && sizes.type == kBF16);
  CHECK_FAILS(check(x, {values, scales}), "result 2 (transposed values) is missing");
  CHECK_FAILS(check({x[1], x[0]}, {values, scales, mirrored, mirrored_scales}),
              "an operand before the last has 40 columns; expected a multiple of 128");
  CHECK_FAILS(check({x[0], {kF32, {2, 3, 144, 40}}}, {}),
              "operand 1 (x) is f32[6,144,40]; expected bf16[L=6,R=144,columns]");
  CHECK_FAILS(check({x[0], {kBF16, {2, 3, 128, 40}}}, {}),
              "(x) is bf16[6,128,40]; expected bf16[L=6,R=144,columns]");
  CHECK_FAILS(check({}, {values, scales}), "operand 0 (x) is missing");
  CHECK_FAILS(check({{kBF16, {144}}}, {}), "(x) is bf16[144]; expected f16|bf16|f32[L,R,columns]");
  config.transposed = false;
  CHECK_OK(check(x, {values, scales}));
  CHECK_FAILS(check(x, {values, mirrored_scales}),
              "(scales) is f32[6,3,2]; expected f32[L=6,R/128=2,C/128=3]");
  CHECK_FAILS(check(x, {values, scales, mirrored, mirrored_scales}), "4 results are given");
  config = {.transposed = true};
  CHECK_OK(check({{kF32, {200, 7}}}, {{kF8E4M3, {7, 200}}, {kF32, {1, 2}}}));
  CHECK(sizes.num_matrices == 1 && sizes.type == kF32);
  CHECK_FAILS(check(x, {values, mirrored_scales}),
              "(transposed values) is f8e4m3fn[6,144,296]; expected f8e4m3fn[L=6,C=296,R=144]");
}

void TestGroupedMatmulActivation() {
  GroupedMatmulActivationConfig config;
  config.activation = Activation::kSwiglu;
  config.has_bias = config.has_row_weights = config.keep_pre_activation = true;
  const List operands = {
      {kBF16, {40, 64}}, {kF32, {2, 64, 48}}, {kS32, {2}}, {kF32, {2, 48}}, {kF32, {40}}};
  GroupedMatmulSizes sizes;
  CHECK_OK(Run(CheckGroupedMatmulActivation, config, operands,
               {{kBF16, {40, 24}}, {kBF16, {40, 48}}}, &sizes));
  CHECK(sizes.num_groups == 2 && sizes.contracted == 64 && sizes.columns == 24);
  CHECK_FAILS(Run(CheckGroupedMatmulActivation, config, operands,
                  {{kBF16, {40, 48}}, {kBF16, {40, 48}}}, &sizes),
              "N is 48 with F = 48; expected 96");
  config.has_bias = false;
  CHECK_FAILS(Run(CheckGroupedMatmulActivation, config, operands,
                  {{kBF16, {40, 24}}, {kBF16, {40, 48}}}, &sizes),
              "row_weights");
}

void TestGroupedMatmulActivationGradient() {
  const GroupedMatmulActivationConfig config{.activation = Activation::kRelu2};
  const List operands = {{kF16, {40, 64}}, {kF16, {2, 136, 64}}, {kS32, {2}}, {kF16, {40, 136}}};
  const List results = {{kF16, {40, 136}}, {kF16, {40, 136}}, {kF32, {40, 2}}};
  GroupedMatmulSizes sizes;
  CHECK_OK(Run(CheckGroupedMatmulActivationGradient, config, operands, results, &sizes));
  CHECK(sizes.columns == 136 && sizes.contracted == 64);
  CHECK_FAILS(Run(CheckGroupedMatmulActivationGradient, config, operands,
                  {results[0], results[1], {kF32, {40, 1}}}, &sizes),
              "row dots is 1 with F = 136; expected 2");
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestDispatch();
  jax_ep::TestDispatchRefused();
  jax_ep::TestQuantizedRows();
  jax_ep::TestRedispatch();
  jax_ep::TestCombine();
  jax_ep::TestGroupedMatmul();
  jax_ep::TestGroupedMatmulRhsGradient();
  jax_ep::TestAccumulator();
  jax_ep::TestGroupedMatmulQuantized();
  jax_ep::TestGroupedMatmulQuantizedActivation();
  jax_ep::TestQuantize();
  jax_ep::TestQuantizeWeights();
  jax_ep::TestGroupedMatmulActivation();
  jax_ep::TestGroupedMatmulActivationGradient();
  return jax_ep::testing::Finish();
}
