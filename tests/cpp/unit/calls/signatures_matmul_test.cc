#include <vector>

#include "ffi/runtime/calls/signatures.h"
#include "tests/cpp/unit/calls/signature_buffers.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep {
namespace {

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

void TestGroupedMatmulMxFp4() {
  const GroupedMatmulMxFp4Config config;
  GroupedMatmulSizes sizes;
  const List given = {
      {kBF16, {40, 96}}, {kF4E2M1, {3, 136, 96}}, {kF8E8M0, {3, 136, 3}}, {kS32, {3}}};
  const List results = {{kBF16, {40, 136}}};
  CHECK_OK(Run(CheckGroupedMatmulMxFp4, config, given, results, &sizes));
  CHECK(sizes.num_groups == 3 && sizes.num_rows == 40);
  CHECK(sizes.contracted == 96 && sizes.columns == 136 && sizes.result_type == kBF16);
  CHECK_OK(Run(CheckGroupedMatmulMxFp4, config, given, {{kF32, {40, 136}}}, &sizes));
  CHECK(sizes.result_type == kF32);
  const auto refused = [&](size_t index, const OwnedBuffer& operand, const char* message) {
    List operands = given;
    operands[index] = operand;
    CHECK_FAILS(Run(CheckGroupedMatmulMxFp4, config, operands, results, &sizes), message);
  };
  refused(0, {kF16, {40, 96}}, "(lhs) is f16[40,96]; expected bf16[M,K]");
  refused(1, {kF8E4M3, {3, 136, 96}}, "(rhs) is f8e4m3fn[3,136,96]; expected f4e2m1fn[L,N,K=96]");
  refused(2, {kF8E8M0, {3, 136, 4}}, "expected f8e8m0fnu[L=3,N=136,K/32=3]");
  refused(3, {kS32, {2}}, "(group_sizes) is s32[2]; expected s32[L=3]");
  CHECK_FAILS(Run(CheckGroupedMatmulMxFp4, config, given, {{kF16, {40, 136}}}, &sizes),
              "(out) is f16[40,136]; expected bf16|f32");
}

void TestGroupedMatmulMxFp4LhsGradient() {
  const GroupedMatmulMxFp4Config config;
  GroupedMatmulSizes sizes;
  const List given = {
      {kBF16, {40, 136}}, {kF4E2M1, {3, 136, 96}}, {kF8E8M0, {3, 136, 3}}, {kS32, {3}}};
  const List results = {{kBF16, {40, 96}}};
  CHECK_OK(Run(CheckGroupedMatmulMxFp4LhsGradient, config, given, results, &sizes));
  CHECK(sizes.num_groups == 3 && sizes.num_rows == 40);
  CHECK(sizes.contracted == 136 && sizes.columns == 96 && sizes.result_type == kBF16);
  CHECK_OK(Run(CheckGroupedMatmulMxFp4LhsGradient, config, given, {{kF32, {40, 96}}}, &sizes));
  CHECK(sizes.result_type == kF32);
  const auto refused = [&](size_t index, const OwnedBuffer& operand, const char* message) {
    List operands = given;
    operands[index] = operand;
    CHECK_FAILS(Run(CheckGroupedMatmulMxFp4LhsGradient, config, operands, results, &sizes),
                message);
  };
  refused(0, {kF32, {40, 136}}, "(out_gradient) is f32[40,136]; expected bf16[M,N]");
  refused(1, {kF4E2M1, {3, 128, 96}}, "(rhs) is f4e2m1fn[3,128,96]; expected f4e2m1fn[L,N=136,K]");
  refused(2, {kF8E8M0, {3, 136, 4}}, "expected f8e8m0fnu[L=3,N=136,K/32=3]");
  CHECK_FAILS(Run(CheckGroupedMatmulMxFp4LhsGradient, config, given, {{kBF16, {40, 136}}}, &sizes),
              "(lhs_gradient) is bf16[40,136]; expected bf16|f32[M=40,K=96]");
}

void TestGroupedMatmulMxFp4Activation() {
  GroupedMatmulMxFp4ActivationConfig config{.epilogue = {.activation = Activation::kSwiglu}};
  config.epilogue.has_bias = config.epilogue.has_row_weights = true;
  config.epilogue.keep_pre_activation = true;
  const List given = {{kBF16, {40, 96}}, {kF4E2M1, {3, 136, 96}}, {kF8E8M0, {3, 136, 3}},
                      {kS32, {3}},       {kF32, {3, 136}},        {kF32, {40}}};
  const List results = {{kBF16, {40, 68}}, {kBF16, {40, 136}}};
  GroupedMatmulSizes sizes;
  const auto check = [&](const List& operands, const List& results) {
    return Run(CheckGroupedMatmulMxFp4Activation, config, operands, results, &sizes);
  };
  CHECK_OK(check(given, results));
  CHECK(sizes.num_groups == 3 && sizes.num_rows == 40);
  CHECK(sizes.contracted == 96 && sizes.columns == 68);
  const auto refused = [&](size_t index, const OwnedBuffer& buffer, const char* message) {
    List operands = given;
    operands[index] = buffer;
    CHECK_FAILS(check(operands, results), message);
  };
  refused(2, {kF8E8M0, {3, 68, 3}}, "expected f8e8m0fnu[L=3,N=136,K/32=3]");
  refused(4, {kF32, {3, 68}}, "(bias) is f32[3,68]; expected f32[L=3,N=136]");
  refused(5, {kF32, {41}}, "(row_weights) is f32[41]; expected f32[M=40]");
  CHECK_FAILS(check(given, {{kF32, {40, 68}}, results[1]}), "(out) is f32[40,68]; expected bf16");
  CHECK_FAILS(check(given, {{kBF16, {40, 136}}, results[1]}),
              "N is 136 with F = 136; expected 272 for this activation");
  config = {};
  CHECK_OK(check({given[0], given[1], given[2], given[3]}, {{kBF16, {40, 136}}}));
  CHECK(sizes.columns == 136);
}

void TestGroupedMatmulQuantizedRhsGradient() {
  GroupedMatmulQuantizedRhsGradientConfig config;
  const List operands = {{kF8E4M3, {4, 144, 128}},
                         {kF32, {4, 144}},
                         {kF8E4M3, {4, 136, 128}},
                         {kF32, {4, 2}},
                         {kS32, {3}}};
  GroupedMatmulSizes sizes;
  const auto check = [&](const List& operands, const OwnedBuffer& result) {
    return Run(CheckGroupedMatmulQuantizedRhsGradient, config, operands, {result}, &sizes);
  };
  const OwnedBuffer accumulator{kF32, {3, 144, 136}};
  CHECK_OK(check(operands, {kBF16, {3, 144, 136}}));
  CHECK(sizes.num_groups == 3 && sizes.num_rows == 512);
  CHECK(sizes.contracted == 144 && sizes.columns == 136 && sizes.rhs_type == kBF16);
  CHECK_FAILS(check(operands, {kBF16, {3, 136, 144}}), "expected bf16|f32[L=3,K=144,N=136]");
  List others = operands;
  others[3] = {kF32, {4, 136}};
  CHECK_FAILS(check(others, accumulator), "(b_scales) is f32[4,136]; expected f32[B=4,N/128=2]");
  config.has_accumulator = true;
  CHECK_OK(check(operands + List{accumulator}, accumulator));
  CHECK(sizes.rhs_type == kF32);
  CHECK_FAILS(check(operands, accumulator), "operand 5 (accumulator) is missing");
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
  jax_ep::TestGroupedMatmul();
  jax_ep::TestGroupedMatmulRhsGradient();
  jax_ep::TestAccumulator();
  jax_ep::TestGroupedMatmulQuantized();
  jax_ep::TestGroupedMatmulMxFp4();
  jax_ep::TestGroupedMatmulMxFp4LhsGradient();
  jax_ep::TestGroupedMatmulMxFp4Activation();
  jax_ep::TestGroupedMatmulQuantizedRhsGradient();
  jax_ep::TestGroupedMatmulQuantizedActivation();
  jax_ep::TestGroupedMatmulActivation();
  jax_ep::TestGroupedMatmulActivationGradient();
  return jax_ep::testing::Finish();
}
