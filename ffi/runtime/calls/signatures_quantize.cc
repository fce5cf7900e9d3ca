#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ffi/device/common/integers.h"
#include "ffi/runtime/calls/signatures.h"

namespace jax_ep {
namespace {

// Buffers whose axes before the last `num_last` are one.
class Collapsed {
 public:
  Collapsed(Buffers buffers, size_t num_last) : dims_(buffers.size()) {
    for (size_t i = 0; i < buffers.size(); ++i) {
      const std::span<const int64_t> dims = buffers[i].dims;
      views_.push_back(buffers[i]);
      if (dims.size() < num_last) continue;
      const std::span<const int64_t> last = dims.last(num_last);
      dims_[i] = {1};
      for (int64_t dim : dims.first(dims.size() - num_last)) dims_[i][0] *= dim;
      dims_[i].insert(dims_[i].end(), last.begin(), last.end());
      views_[i].dims = dims_[i];
    }
  }

  Buffers views() const { return views_; }

 private:
  std::vector<std::vector<int64_t>> dims_;
  std::vector<BufferView> views_;
};

}  // namespace

Status CheckQuantize(const QuantizeConfig& config, Buffers operands, Buffers results,
                     QuantizeSizes* sizes) {
  const Collapsed x(operands, 1), out(results, 1);
  BufferChecker check(kQuantizeTarget, x.views(), out.views());
  Size m{"M"}, k{"K"}, s{"S", 1};
  Types rows{kRowTypes}, f32{kF32};
  Types values{static_cast<uint16_t>(config.is_e5m2 ? kF8E5M2 : kF8E4M3)};
  check.Operand("x", rows, {&m, &k});
  if (config.scale_block > 0) s.value = CeilDivide(k.value, config.scale_block);
  check.Result("values", values, {&m, &k});
  check.Result("scales", f32, {&m, &s});
  if (Status status = check.Finish(); !status.ok()) return status;
  *sizes = {m.value, k.value, rows.type()};
  return {};
}

Status CheckQuantizeWeights(const QuantizeWeightsConfig& config, Buffers operands, Buffers results,
                            QuantizeWeightsSizes* sizes) {
  const Collapsed x(operands, 2), out(results, 2);
  BufferChecker check(kQuantizeWeightsTarget, x.views(), out.views());
  Size l{"L"}, r{"R"}, c{"C", 0}, r_blocks{"R/128"}, c_blocks{"C/128"};
  Types matrices{kRowTypes}, f32{kF32}, e4m3{kF8E4M3};
  std::vector<Size> parts(std::max<size_t>(operands.size(), 1), Size{"columns"});
  for (Size& part : parts) check.Operand("x", matrices, {&l, &r, &part});
  for (const Size& part : parts) c.value += part.value;
  r_blocks.value = CeilDivide(r.value, kScaleBlock);
  c_blocks.value = CeilDivide(c.value, kScaleBlock);
  if (config.as_given) {
    check.Result("values", e4m3, {&l, &r, &c});
    check.Result("scales", f32, {&l, &r_blocks, &c_blocks});
  }
  if (config.transposed) {
    check.Result("transposed values", e4m3, {&l, &c, &r});
    check.Result("transposed scales", f32, {&l, &c_blocks, &r_blocks});
  }
  if (Status status = check.Finish(); !status.ok()) return status;
  *sizes = {l.value, r.value, {}, c.value, matrices.type()};
  for (const Size& part : parts) {
    if (&part != &parts.back() && part.value % kScaleBlock != 0) {
      return InvalidArgument(kQuantizeWeightsTarget, ": an operand before the last has ",
                             part.value, " columns; expected a multiple of ", kScaleBlock);
    }
    sizes->columns.push_back(part.value);
  }
  return {};
}

Status CheckQuantizeTransposed(const QuantizeTransposedConfig& config, Buffers operands,
                               Buffers results, QuantizeTransposedSizes* sizes) {
  BufferChecker check(kQuantizeTransposedTarget, operands, results);
  Size m{"M"}, c{"C"}, b{"B"}, rows{"128", kScaleBlock}, s{"S"}, x_scales{"X"};
  Types x{config.is_quantized ? static_cast<uint16_t>(kF8E4M3) : kRowTypes};
  Types s32{kS32}, f32{kF32}, e4m3{kF8E4M3};
  check.Operand("x", x, {&m, &c});
  if (config.is_quantized) check.Operand("x_scales", f32, {&m, &x_scales});
  check.Operand("first_rows", s32, {&b});
  check.Operand("num_rows", s32, {&b});
  s.value = config.per_column ? c.value : CeilDivide(c.value, kScaleBlock);
  check.Result("values", e4m3, {&b, &c, &rows});
  check.Result("scales", f32, {&b, &s});
  if (Status status = check.Finish(); !status.ok()) return status;
  const int64_t blocks = CeilDivide(c.value, kScaleBlock);
  if (config.is_quantized && x_scales.value != 1 && x_scales.value != blocks) {
    return InvalidArgument(kQuantizeTransposedTarget, ": a row of ", c.value, " values has ",
                           x_scales.value, " scales; expected one, or ", blocks, " for blocks of ",
                           kScaleBlock);
  }
  *sizes = {m.value, c.value, b.value, x_scales.value, x.type()};
  return {};
}

Status CheckQuantizeBoth(const QuantizeBothConfig& config, Buffers operands, Buffers results,
                         QuantizeTransposedSizes* sizes) {
  BufferChecker check(kQuantizeBothTarget, operands, results);
  Size m{"M"}, c{"C"}, b{"B"}, rows{"128", kScaleBlock}, c_blocks{"C/128"}, s{"S"};
  Types x{kRowTypes}, s32{kS32}, f32{kF32}, e4m3{kF8E4M3};
  check.Operand("x", x, {&m, &c});
  check.Operand("first_rows", s32, {&b});
  check.Operand("num_rows", s32, {&b});
  c_blocks.value = CeilDivide(c.value, kScaleBlock);
  s.value = config.per_column ? c.value : c_blocks.value;
  check.Result("row_values", e4m3, {&m, &c});
  check.Result("row_scales", f32, {&m, &c_blocks});
  check.Result("values", e4m3, {&b, &c, &rows});
  check.Result("scales", f32, {&b, &s});
  if (Status status = check.Finish(); !status.ok()) return status;
  *sizes = {.num_rows = m.value, .columns = c.value, .row_blocks = b.value, .type = x.type()};
  return {};
}

Status CheckQuantizeActivationGradient(const QuantizeActivationGradientConfig& config,
                                       Buffers operands, Buffers results,
                                       QuantizeTransposedSizes* sizes) {
  BufferChecker check(kQuantizeActivationGradientTarget, operands, results);
  Size m{"M"}, f{"F"}, n{"2F"}, b{"B"}, rows{"128", kScaleBlock};
  Size f_blocks{"F/128"}, n_blocks{"2F/128"};
  Types bf16{kBF16}, s32{kS32}, f32{kF32}, e4m3{kF8E4M3};
  check.Operand("activations_gradient", bf16, {&m, &f});
  n.value = 2 * f.value;
  check.Operand("pre_activation", bf16, {&m, &n});
  check.Operand("first_rows", s32, {&b});
  check.Operand("num_rows", s32, {&b});
  if (config.has_row_weights) check.Operand("row_weights", f32, {&m});
  f_blocks.value = CeilDivide(f.value, kScaleBlock);
  n_blocks.value = CeilDivide(n.value, kScaleBlock);
  check.Result("row_values", e4m3, {&m, &n});
  check.Result("row_scales", f32, {&m, &n_blocks});
  check.Result("values", e4m3, {&b, &n, &rows});
  check.Result("scales", f32, {&b, &n_blocks});
  check.Result("activation_values", e4m3, {&b, &f, &rows});
  check.Result("activation_scales", f32, {&b, &f});
  check.Result("row_dots", f32, {&m, &f_blocks});
  if (Status status = check.Finish(); !status.ok()) return status;
  *sizes = {.num_rows = m.value, .columns = f.value, .row_blocks = b.value, .type = kBF16};
  return {};
}

}  // namespace jax_ep
