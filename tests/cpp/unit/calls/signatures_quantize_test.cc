#include <vector>

#include "ffi/runtime/calls/signatures.h"
#include "tests/cpp/unit/calls/signature_buffers.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

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

void TestQuantizeTransposed() {
  QuantizeTransposedConfig config{.per_column = true};
  const OwnedBuffer blocks{kS32, {4}}, values{kF8E4M3, {4, 144, 128}};
  const List operands = {{kBF16, {300, 144}}, blocks, blocks};
  QuantizeTransposedSizes sizes;
  const auto check = [&](const List& operands, const List& results) {
    return Run(CheckQuantizeTransposed, config, operands, results, &sizes);
  };
  CHECK_OK(check(operands, {values, {kF32, {4, 144}}}));
  CHECK(sizes.num_rows == 300 && sizes.columns == 144 && sizes.row_blocks == 4);
  CHECK(sizes.type == kBF16);
  CHECK_FAILS(check(operands, {values, {kF32, {4, 2}}}), "expected f32[B=4,S=144]");
  CHECK_FAILS(check(operands, {{kF8E4M3, {4, 144, 64}}, {kF32, {4, 144}}}),
              "(values) is f8e4m3fn[4,144,64]; expected f8e4m3fn[B=4,C=144,128=128]");
  CHECK_FAILS(check({operands[0], blocks, {kS32, {5}}}, {}), "(num_rows) is s32[5]");
  config = {.is_quantized = true};
  const OwnedBuffer rows{kF8E4M3, {300, 144}};
  const List results = {values, {kF32, {4, 2}}};
  for (int64_t scales : {1, 2}) {
    CHECK_OK(check({rows, {kF32, {300, scales}}, blocks, blocks}, results));
    CHECK(sizes.x_scales == scales && sizes.type == kF8E4M3);
  }
  CHECK_FAILS(check({rows, {kF32, {300, 3}}, blocks, blocks}, results),
              "a row of 144 values has 3 scales; expected one, or 2 for blocks of 128");
  CHECK_FAILS(check(operands, results), "(x) is bf16[300,144]; expected f8e4m3fn[M,C]");
}

void TestQuantizeBoth() {
  QuantizeBothConfig config;
  const OwnedBuffer blocks{kS32, {4}}, rows{kF8E4M3, {300, 144}}, row_scales{kF32, {300, 2}};
  const OwnedBuffer values{kF8E4M3, {4, 144, 128}}, scales{kF32, {4, 2}};
  const List operands = {{kF32, {300, 144}}, blocks, blocks};
  QuantizeTransposedSizes sizes;
  const auto check = [&](const List& operands, const List& results) {
    return Run(CheckQuantizeBoth, config, operands, results, &sizes);
  };
  CHECK_OK(check(operands, {rows, row_scales, values, scales}));
  CHECK(sizes.num_rows == 300 && sizes.columns == 144 && sizes.row_blocks == 4);
  CHECK(sizes.type == kF32);
  CHECK_FAILS(check(operands, {rows, {kF32, {300, 1}}, values, scales}),
              "(row_scales) is f32[300,1]; expected f32[M=300,C/128=2]");
  CHECK_FAILS(check(operands, {values, row_scales, rows, scales}),
              "(row_values) is f8e4m3fn[4,144,128]; expected f8e4m3fn[M=300,C=144]");
  CHECK_FAILS(check({rows, blocks, blocks}, {}),
              "(x) is f8e4m3fn[300,144]; expected f16|bf16|f32[M,C]");
  config.per_column = true;
  CHECK_OK(check(operands, {rows, row_scales, values, {kF32, {4, 144}}}));
  CHECK_FAILS(check(operands, {rows, row_scales, values, scales}), "expected f32[B=4,S=144]");
}

void TestQuantizeActivationGradient() {
  QuantizeActivationGradientConfig config{.has_row_weights = true};
  const OwnedBuffer blocks{kS32, {4}}, weights{kF32, {300}};
  const List operands = {{kBF16, {300, 128}}, {kBF16, {300, 256}}, blocks, blocks, weights};
  const List results = {{kF8E4M3, {300, 256}}, {kF32, {300, 2}},         {kF8E4M3, {4, 256, 128}},
                        {kF32, {4, 2}},        {kF8E4M3, {4, 128, 128}}, {kF32, {4, 128}},
                        {kF32, {300, 1}}};
  QuantizeTransposedSizes sizes;
  const auto check = [&](const List& operands, const List& results) {
    return Run(CheckQuantizeActivationGradient, config, operands, results, &sizes);
  };
  CHECK_OK(check(operands, results));
  CHECK(sizes.num_rows == 300 && sizes.columns == 128 && sizes.row_blocks == 4);
  CHECK_FAILS(check({operands[0], operands[0], blocks, blocks, weights}, results),
              "(pre_activation) is bf16[300,128]; expected bf16[M=300,2F=256]");
  CHECK_FAILS(check({{kF32, {300, 128}}, operands[1], blocks, blocks, weights}, results),
              "(activations_gradient) is f32[300,128]; expected bf16[M,F]");
  CHECK_FAILS(check({operands[0], operands[1], blocks, blocks}, results),
              "operand 4 (row_weights) is missing");
  List other = results;
  other[5] = results[3];
  CHECK_FAILS(check(operands, other), "(activation_scales) is f32[4,2]; expected f32[B=4,F=128]");
}

}  // namespace
}  // namespace jax_ep

int main() {
  jax_ep::TestQuantize();
  jax_ep::TestQuantizeWeights();
  jax_ep::TestQuantizeTransposed();
  jax_ep::TestQuantizeBoth();
  jax_ep::TestQuantizeActivationGradient();
  return jax_ep::testing::Finish();
}
