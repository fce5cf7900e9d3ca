#include <cstdint>
#include <string_view>

#include "ffi/device/common/integers.h"
#include "ffi/runtime/calls/signatures.h"

namespace jax_ep {

constexpr int64_t kMxFp4ScaleBlock = 32;  // values that share a scale

Status CheckGroupedMatmul(const GroupedMatmulConfig& config, Buffers operands, Buffers results,
                          GroupedMatmulSizes* sizes) {
  BufferChecker check(kGroupedMatmulTarget, operands, results);
  Size m{"M"}, k{"K"}, n{"N"}, l{"L"};
  Types lhs{kRowTypes}, rhs{kRowTypes}, out{kRowTypes}, s32{kS32};
  check.Operand("lhs", lhs, {&m, &k});
  check.Operand("rhs", rhs, {&l, config.transpose_rhs ? &n : &k, config.transpose_rhs ? &k : &n});
  check.Operand("group_sizes", s32, {&l});
  check.Result("out", out, {&m, &n});
  if (Status status = check.Finish(); !status.ok()) return status;
  *sizes = {l.value, m.value, k.value, n.value, lhs.type(), rhs.type(), out.type()};
  return {};
}

Status CheckGroupedMatmulRhsGradient(const GroupedMatmulConfig& config, Buffers operands,
                                     Buffers results, GroupedMatmulSizes* sizes) {
  BufferChecker check(kGroupedMatmulRhsGradientTarget, operands, results);
  Size m{"M"}, k{"K"}, n{"N"}, l{"L"};
  Size* const rows = config.transpose_rhs ? &n : &k;
  Size* const columns = config.transpose_rhs ? &k : &n;
  Types lhs{kRowTypes}, out{kRowTypes}, s32{kS32};
  Types rhs{config.has_accumulator ? static_cast<uint16_t>(kF32) : kRowTypes};
  check.Operand("lhs", lhs, {&m, &k});
  check.Operand("out_gradient", out, {&m, &n});
  check.Operand("group_sizes", s32, {&l});
  if (config.has_accumulator) check.Operand("accumulator", rhs, {&l, rows, columns});
  check.Result("rhs_gradient", rhs, {&l, rows, columns});
  if (Status status = check.Finish(); !status.ok()) return status;
  *sizes = {l.value, m.value, k.value, n.value, lhs.type(), rhs.type(), out.type()};
  return {};
}

Status CheckGroupedMatmulQuantized(const GroupedMatmulQuantizedConfig& config, Buffers operands,
                                   Buffers results, GroupedMatmulSizes* sizes) {
  BufferChecker check(kGroupedMatmulQuantizedTarget, operands, results);
  const bool has_blocks = config.scale_block > 0;
  Size m{"M"}, k{"K"}, n{"N"}, l{"L"}, one{"1", 1}, k_blocks{"K/128"}, n_blocks{"N/128"};
  Types lhs{has_blocks ? static_cast<uint16_t>(kF8E4M3) : static_cast<uint16_t>(kF8E4M3 | kF8E5M2)};
  Types rhs{kF8E4M3}, out{kBF16 | kF32}, s32{kS32}, f32{kF32};
  check.Operand("lhs", lhs, {&m, &k});
  if (has_blocks) k_blocks.value = CeilDivide(k.value, config.scale_block);
  check.Operand("lhs_scales", f32, {&m, has_blocks ? &k_blocks : &one});
  check.Operand("rhs", rhs, {&l, &n, &k});
  if (has_blocks) n_blocks.value = CeilDivide(n.value, config.scale_block);
  check.Operand("rhs_scales", f32,
                {&l, has_blocks ? &n_blocks : &n, has_blocks ? &k_blocks : &one});
  check.Operand("group_sizes", s32, {&l});
  check.Result("out", out, {&m, &n});
  if (Status status = check.Finish(); !status.ok()) return status;
  *sizes = {l.value, m.value, k.value, n.value, lhs.type(), rhs.type(), out.type()};
  return {};
}

Status CheckGroupedMatmulMxFp4(const GroupedMatmulMxFp4Config& /*config*/, Buffers operands,
                               Buffers results, GroupedMatmulSizes* sizes) {
  BufferChecker check(kGroupedMatmulMxFp4Target, operands, results);
  Size m{"M"}, k{"K"}, n{"N"}, l{"L"}, blocks{"K/32"};
  Types bf16{kBF16}, values{kF4E2M1}, scales{kF8E8M0}, s32{kS32}, out{kBF16 | kF32};
  check.Operand("lhs", bf16, {&m, &k});
  check.Operand("rhs", values, {&l, &n, &k});
  blocks.value = CeilDivide(k.value, kMxFp4ScaleBlock);
  check.Operand("rhs_scales", scales, {&l, &n, &blocks});
  check.Operand("group_sizes", s32, {&l});
  check.Result("out", out, {&m, &n});
  if (Status status = check.Finish(); !status.ok()) return status;
  *sizes = {l.value, m.value, k.value, n.value, bf16.type(), values.type(), out.type()};
  return {};
}

Status CheckGroupedMatmulMxFp4LhsGradient(const GroupedMatmulMxFp4Config& /*config*/,
                                          Buffers operands, Buffers results,
                                          GroupedMatmulSizes* sizes) {
  BufferChecker check(kGroupedMatmulMxFp4LhsGradientTarget, operands, results);
  Size m{"M"}, k{"K"}, n{"N"}, l{"L"}, blocks{"K/32"};
  Types bf16{kBF16}, values{kF4E2M1}, scales{kF8E8M0}, s32{kS32}, gradient{kBF16 | kF32};
  check.Operand("out_gradient", bf16, {&m, &n});
  check.Operand("rhs", values, {&l, &n, &k});
  blocks.value = CeilDivide(k.value, kMxFp4ScaleBlock);
  check.Operand("rhs_scales", scales, {&l, &n, &blocks});
  check.Operand("group_sizes", s32, {&l});
  check.Result("lhs_gradient", gradient, {&m, &k});
  if (Status status = check.Finish(); !status.ok()) return status;
  *sizes = {l.value, m.value, n.value, k.value, bf16.type(), values.type(), gradient.type()};
  return {};
}

Status CheckGroupedMatmulQuantizedRhsGradient(const GroupedMatmulQuantizedRhsGradientConfig& config,
                                              Buffers operands, Buffers results,
                                              GroupedMatmulSizes* sizes) {
  BufferChecker check(kGroupedMatmulQuantizedRhsGradientTarget, operands, results);
  Size b{"B"}, k{"K"}, n{"N"}, l{"L"}, rows{"128", kScaleBlock}, n_blocks{"N/128"};
  Types f8{kF8E4M3}, f32{kF32}, s32{kS32};
  Types gradient{config.has_accumulator ? static_cast<uint16_t>(kF32)
                                        : static_cast<uint16_t>(kBF16 | kF32)};
  check.Operand("a", f8, {&b, &k, &rows});
  check.Operand("a_scales", f32, {&b, &k});
  check.Operand("b", f8, {&b, &n, &rows});
  n_blocks.value = CeilDivide(n.value, kScaleBlock);
  check.Operand("b_scales", f32, {&b, &n_blocks});
  check.Operand("group_sizes", s32, {&l});
  if (config.has_accumulator) check.Operand("accumulator", gradient, {&l, &k, &n});
  check.Result("rhs_gradient", gradient, {&l, &k, &n});
  if (Status status = check.Finish(); !status.ok()) return status;
  *sizes = {l.value,   b.value * kScaleBlock, k.value,  n.value,
            f8.type(), gradient.type(),       f8.type()};
  return {};
}

namespace {

// Checks sizes that follow from F: the columns of pre-activations, and the blocks of row dots.
Status CheckColumns(std::string_view target, const GroupedMatmulActivationConfig& config,
                    const Size& f, const Size& n, const Size* blocks) {
  constexpr int64_t kColumnsPerDot = 128;
  const int64_t columns = IsGated(config.activation) ? 2 * f.value : f.value;
  if (n.value != columns) {
    return InvalidArgument(target, ": ", n.name, " is ", n.value, " with F = ", f.value,
                           "; expected ", columns, " for this activation");
  }
  const int64_t num_blocks = CeilDivide(f.value, kColumnsPerDot);
  if (blocks != nullptr && blocks->value != num_blocks) {
    return InvalidArgument(target, ": ", blocks->name, " is ", blocks->value, " with F = ", f.value,
                           "; expected ", num_blocks);
  }
  return {};
}

}  // namespace

Status CheckGroupedMatmulQuantizedActivation(const GroupedMatmulQuantizedActivationConfig& config,
                                             Buffers operands, Buffers results,
                                             GroupedMatmulSizes* sizes) {
  BufferChecker check(kGroupedMatmulQuantizedActivationTarget, operands, results);
  Size m{"M"}, k{"K"}, n{"2F"}, f{"F"}, l{"L"}, k_blocks{"K/128"}, n_blocks{"2F/128"},
      f_blocks{"F/128"};
  Types f8{kF8E4M3}, bf16{kBF16}, s32{kS32}, f32{kF32};
  check.Operand("lhs", f8, {&m, &k});
  k_blocks.value = CeilDivide(k.value, kScaleBlock);
  check.Operand("lhs_scales", f32, {&m, &k_blocks});
  check.Operand("rhs", f8, {&l, &n, &k});
  n_blocks.value = CeilDivide(n.value, kScaleBlock);
  check.Operand("rhs_scales", f32, {&l, &n_blocks, &k_blocks});
  check.Operand("group_sizes", s32, {&l});
  if (config.has_row_weights) check.Operand("row_weights", f32, {&m});
  f.value = n.value / 2;
  f_blocks.value = CeilDivide(f.value, kScaleBlock);
  check.Result("out", f8, {&m, &f});
  check.Result("out_scales", f32, {&m, &f_blocks});
  if (config.keep_pre_activation) check.Result("pre_activation", bf16, {&m, &n});
  if (Status status = check.Finish(); !status.ok()) return status;
  if (n.value % (2 * kScaleBlock) != 0) {
    return InvalidArgument(kGroupedMatmulQuantizedActivationTarget, ": 2F is ", n.value,
                           "; expected a multiple of ", 2 * kScaleBlock);
  }
  *sizes = {l.value, m.value, k.value, f.value, f8.type(), f8.type(), f8.type()};
  return {};
}

Status CheckGroupedMatmulMxFp4Activation(const GroupedMatmulMxFp4ActivationConfig& config,
                                         Buffers operands, Buffers results,
                                         GroupedMatmulSizes* sizes) {
  const GroupedMatmulActivationConfig& epilogue = config.epilogue;
  BufferChecker check(kGroupedMatmulMxFp4ActivationTarget, operands, results);
  Size m{"M"}, k{"K"}, n{"N"}, f{"F"}, l{"L"}, blocks{"K/32"};
  Types bf16{kBF16}, values{kF4E2M1}, scales{kF8E8M0}, s32{kS32}, f32{kF32};
  check.Operand("lhs", bf16, {&m, &k});
  check.Operand("rhs", values, {&l, &n, &k});
  blocks.value = CeilDivide(k.value, kMxFp4ScaleBlock);
  check.Operand("rhs_scales", scales, {&l, &n, &blocks});
  check.Operand("group_sizes", s32, {&l});
  if (epilogue.has_bias) check.Operand("bias", f32, {&l, &n});
  if (epilogue.has_row_weights) check.Operand("row_weights", f32, {&m});
  check.Result("out", bf16, {&m, &f});
  if (epilogue.keep_pre_activation) check.Result("pre_activation", bf16, {&m, &n});
  if (Status status = check.Finish(); !status.ok()) return status;
  *sizes = {l.value, m.value, k.value, f.value, bf16.type(), values.type(), bf16.type()};
  return CheckColumns(kGroupedMatmulMxFp4ActivationTarget, epilogue, f, n, nullptr);
}

Status CheckGroupedMatmulActivation(const GroupedMatmulActivationConfig& config, Buffers operands,
                                    Buffers results, GroupedMatmulSizes* sizes) {
  BufferChecker check(kGroupedMatmulActivationTarget, operands, results);
  Size m{"M"}, k{"K"}, n{"N"}, f{"F"}, l{"L"};
  Types lhs{kRowTypes}, rhs{kRowTypes}, s32{kS32}, f32{kF32};
  check.Operand("lhs", lhs, {&m, &k});
  check.Operand("rhs", rhs, {&l, &k, &n});
  check.Operand("group_sizes", s32, {&l});
  if (config.has_bias) check.Operand("bias", f32, {&l, &n});
  if (config.has_row_weights) check.Operand("row_weights", f32, {&m});
  check.Result("out", lhs, {&m, &f});
  if (config.keep_pre_activation) check.Result("pre_activation", lhs, {&m, &n});
  if (Status status = check.Finish(); !status.ok()) return status;
  *sizes = {l.value, m.value, k.value, f.value, lhs.type(), rhs.type(), lhs.type()};
  return CheckColumns(kGroupedMatmulActivationTarget, config, f, n, nullptr);
}

Status CheckGroupedMatmulActivationGradient(const GroupedMatmulActivationConfig& config,
                                            Buffers operands, Buffers results,
                                            GroupedMatmulSizes* sizes) {
  BufferChecker check(kGroupedMatmulActivationGradientTarget, operands, results);
  Size m{"M"}, k{"K"}, n{"N"}, f{"F"}, l{"L"}, blocks{"the number of row dots"};
  Types rows{kRowTypes}, rhs{kRowTypes}, s32{kS32}, f32{kF32};
  check.Operand("out_gradient", rows, {&m, &k});
  check.Operand("rhs", rhs, {&l, &f, &k});
  check.Operand("group_sizes", s32, {&l});
  check.Operand("pre_activation", rows, {&m, &n});
  if (config.has_row_weights) check.Operand("row_weights", f32, {&m});
  check.Result("pre_activation_gradient", rows, {&m, &n});
  check.Result("activations", rows, {&m, &f});
  check.Result("row_dots", f32, {&m, &blocks});
  if (Status status = check.Finish(); !status.ok()) return status;
  *sizes = {l.value, m.value, k.value, f.value, rows.type(), rhs.type(), rows.type()};
  return CheckColumns(kGroupedMatmulActivationGradientTarget, config, f, n, &blocks);
}

}  // namespace jax_ep
