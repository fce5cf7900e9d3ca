#include <vector>

#include "ffi/runtime/calls/signatures.h"
#include "tests/cpp/unit/calls/signature_buffers.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

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

// In 2 domains of 2 ranks.
TransferConfig OverDomains(bool has_weights, bool has_scalars = false) {
  TransferConfig config = Config(has_weights, has_scalars);
  config.domain_size = 2;
  return config;
}
const List kForwarding = {{kU32, {2, 16, 1}}, {kS32, {40}}};

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
  CHECK_FAILS(dispatch(tokens, 2, 2),
              "a row of 272 values has 2 scales; expected 3 for blocks of 128, or one");
  CHECK_FAILS(dispatch(tokens, 3, 1), "(row_scales) is f32[40,1]; expected f32[M=40,S=3]");
  CHECK_FAILS(dispatch(kTokens, 1, 1),
              "(x) is bf16[16,64]; expected f8e4m3fn|f8e5m2|f4e2m1fn[T,H]");
  CHECK_OK(Run(CheckRedispatch, config, List{tokens, {kF32, {16, 3}}} + kPlan + List{kChoiceValues},
               {rows, {kF32, {40, 3}}, kRowValues}, &sizes));
  CHECK(sizes.num_scales() == 3 && sizes.top_k == 3);
}

void TestMicroscaledRows() {
  TransferConfig config = Config(false);
  config.is_quantized = true;
  TransferShape sizes;
  const auto dispatch = [&](ElementType values, ElementType type, int64_t scales) {
    return Run(CheckDispatch, config, {{values, {16, 96}}, {type, {16, scales}}, kIds},
               List{{values, {40, 96}}, {type, {40, scales}}} + kPlan, &sizes);
  };
  CHECK_OK(dispatch(kF8E5M2, kF8E8M0, 3));
  CHECK(sizes.format == QuantizedRowFormat(kF8E5M2, 32, kF8E8M0) && sizes.scale_bytes() == 3);
  CHECK_OK(dispatch(kF4E2M1, kF8E8M0, 3));
  CHECK(sizes.operand_bytes() == 48 && sizes.wire_bytes() == 64 && sizes.num_scale_words() == 1);
  CHECK_OK(dispatch(kF4E2M1, kF8E4M3, 6));
  CHECK(sizes.format == QuantizedRowFormat(kF4E2M1, 16, kF8E4M3) && sizes.num_scale_words() == 2);
  CHECK_FAILS(dispatch(kF4E2M1, kF8E4M3, 1), "a row of 96 values has 1 scales; expected 6 for");
  CHECK_FAILS(dispatch(kF4E2M1, kF8E8M0, 6), "a row of 96 values has 6 scales; expected 3 for");
  CHECK_FAILS(dispatch(kF4E2M1, kF8E5M2, 3), "expected f32|f8e4m3fn|f8e8m0fnu[T=16,S]");
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

void TestDomains() {
  TransferShape sizes;
  const List plan = kPlan + kForwarding;
  CHECK_OK(Run(CheckDispatch, Config(true), {kTokens, kIds, kChoiceValues},
               List{kRows, kRowValues} + kPlan, &sizes));
  CHECK(!sizes.has_domains());
  CHECK_OK(Run(CheckDispatch, OverDomains(true), {kTokens, kIds, kChoiceValues},
               List{kRows, kRowValues} + plan, &sizes));
  CHECK(sizes.domain_size == 2 && sizes.num_ranks == 4 && sizes.num_rows == 40);
  sizes = {};
  CHECK_OK(Run(CheckRedispatch, OverDomains(true), List{kTokens} + plan + List{kChoiceValues},
               {kRows, kRowValues}, &sizes));
  CHECK(sizes.domain_size == 2);
  sizes = {};
  CHECK_OK(Run(CheckCombine, OverDomains(true, true),
               List{kRows} + plan + List{kRowValues, kRowValues}, {kTokens, kChoiceValues},
               &sizes));
  CHECK(sizes.domain_size == 2);
  // The bits of 33 ranks need two words.
  TransferConfig wide = OverDomains(false);
  wide.group_size = 99, wide.num_experts = 2 * 99, wide.domain_size = 33;
  CHECK_OK(Run(CheckCombine, wide, List{kRows} + kPlan + List{{kU32, {3, 16, 2}}, {kS32, {40}}},
               {kTokens}, &sizes));
}

void TestDomainsRefused() {
  TransferShape sizes;
  const auto combine = [&](const List& plan) {
    return Run(CheckCombine, OverDomains(false), List{kRows} + plan, {kTokens}, &sizes);
  };
  CHECK_FAILS(combine(kPlan), "operand 12 (plan.forwarding.token_ranks) is missing");
  CHECK_FAILS(combine(kPlan + List{{kS32, {2, 16, 1}}, {kS32, {40}}}),
              "(plan.forwarding.token_ranks) is s32[2,16,1]; "
              "expected u32[D=2,T=16,ceil(N/32)=1]");
  CHECK_FAILS(combine(kPlan + List{{kU32, {4, 16, 1}}, {kS32, {40}}}), "is u32[4,16,1]");
  CHECK_FAILS(combine(kPlan + List{{kU32, {2, 16, 1}}, {kS32, {41}}}),
              "(plan.forwarding.partial_sum_index) is s32[41]; expected s32[M=40]");
  CHECK_FAILS(
      Run(CheckCombine, Config(false), List{kRows} + kPlan + kForwarding, {kTokens}, &sizes),
      "14 operands are given; expected 12");
}

void TestTransferDone() {
  NoSizes sizes;
  const List start = List{kRows, kRowValues} + kPlan + List{kTokens};
  CHECK_OK(Run(CheckTransferDone, TransferDoneConfig{2}, start, List{kRows, kRowValues}, &sizes));
  CHECK_OK(Run(CheckTransferDone, TransferDoneConfig{1}, start, List{kRows}, &sizes));
  CHECK_FAILS(Run(CheckTransferDone, TransferDoneConfig{2}, start, List{kRows}, &sizes),
              "operands and 1 results; expected the 2 results that are returned");
  CHECK_FAILS(Run(CheckTransferDone, TransferDoneConfig{1}, List{kRows}, List{kRows}, &sizes),
              "there are 1 operands");
  CHECK_FAILS(Run(CheckTransferDone, TransferDoneConfig{1}, start, List{kTokens}, &sizes),
              "result 0 differs from the start's in type or shape");
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestDispatch();
  jax_ep::TestQuantizedRows();
  jax_ep::TestMicroscaledRows();
  jax_ep::TestDispatchRefused();
  jax_ep::TestRedispatch();
  jax_ep::TestCombine();
  jax_ep::TestDomains();
  jax_ep::TestTransferDone();
  jax_ep::TestDomainsRefused();
  return jax_ep::testing::Finish();
}
