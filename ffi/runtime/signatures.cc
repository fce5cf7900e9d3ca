#include "ffi/runtime/signatures.h"

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "ffi/device/common/integers.h"

namespace jax_ep {
namespace {

constexpr uint8_t kRowTypes = kBF16 | kF16 | kF32;
constexpr uint8_t kQuantizedTypes = kF8E4M3 | kF8E5M2;

// Kernels move rows in vectors.
constexpr int64_t kRowUnit = kVectorBytes;

// Sizes and types that the buffers of a transfer share.
struct TransferSymbols {
  explicit TransferSymbols(const TransferConfig& config)
      : l{"L", config.experts_per_rank()},
        l1{"L+1", config.experts_per_rank() + 1},
        row{config.is_quantized ? kQuantizedTypes : kRowTypes},
        is_quantized(config.is_quantized) {}

  Size t{"T"}, h{"H"}, k{"K"}, m{"M"}, s{"S"}, l, l1, one{"1", 1}, three{"3", 3};
  Types row, pred{kPred}, s32{kS32}, f32{kF32};
  const bool is_quantized;

  // The fields of a plan in order; `expect` checks the next operand or the next result.
  template <typename Expect>
  void ForEachPlanField(const Expect& expect) {
    expect("plan.group_sizes", s32, {&l});
    expect("plan.real_group_sizes", s32, {&l});
    expect("plan.row_offsets", s32, {&l1});
    expect("plan.row_source", s32, {&m, &three});
    expect("plan.partial_sum_index", s32, {&m});
    expect("plan.kept", pred, {&t, &k});
    expect("plan.destination", s32, {&t, &k});
    expect("plan.num_received", s32, {&one});
    expect("plan.num_dropped", s32, {&one});
    expect("plan.num_bad_ids", s32, {&one});
    expect("plan.status", s32, {&one});
  }

  Status Finish(std::string_view target, const TransferConfig& config, BufferChecker& check,
                TransferShape* shape) {
    if (Status status = check.Finish(); !status.ok()) return status;
    *shape = {.num_tokens = t.value,
              .hidden = h.value,
              .top_k = k.value,
              .num_experts = config.num_experts,
              .num_ranks = config.group_size,
              .num_rows = m.value,
              .format = {.payload = row.type()}};
    if (is_quantized) {
      const int64_t blocks = CeilDivide(h.value, kScaleBlock);
      if (s.value != 1 && s.value != blocks) {
        return InvalidArgument(target, ": a row of ", h.value, " values has ", s.value,
                               " scales; expected one, or ", blocks, " for blocks of ",
                               kScaleBlock);
      }
      shape->format = QuantizedRowFormat(row.type(), blocks * kScaleBlock / s.value);
    }
    if (const int64_t bytes = shape->operand_bytes(); bytes % kRowUnit != 0) {
      return Unimplemented(target, ": a row of ", h.value, " elements has ", bytes,
                           " bytes; the kernels take multiples of ", kRowUnit,
                           ". Pad the hidden size, or use implementation=\"xla\"");
    }
    return {};
  }
};

}  // namespace

Status CheckDispatch(const TransferConfig& config, Buffers operands, Buffers results,
                     TransferShape* shape) {
  BufferChecker check(kDispatchTarget, operands, results);
  TransferSymbols s(config);
  check.Operand("x", s.row, {&s.t, &s.h});
  if (config.is_quantized) check.Operand("scales", s.f32, {&s.t, &s.s});
  check.Operand("topk_ids", s.s32, {&s.t, &s.k});
  if (config.has_weights) check.Operand("topk_weights", s.f32, {&s.t, &s.k});
  check.Result("rows", s.row, {&s.m, &s.h});
  if (config.is_quantized) check.Result("row_scales", s.f32, {&s.m, &s.s});
  if (config.has_weights) check.Result("row_weights", s.f32, {&s.m});
  s.ForEachPlanField([&](const char* name, Types& types, std::initializer_list<Size*> dims) {
    check.Result(name, types, dims);
  });
  return s.Finish(kDispatchTarget, config, check, shape);
}

Status CheckRedispatch(const TransferConfig& config, Buffers operands, Buffers results,
                       TransferShape* shape) {
  BufferChecker check(kRedispatchTarget, operands, results);
  TransferSymbols s(config);
  check.Operand("x", s.row, {&s.t, &s.h});
  if (config.is_quantized) check.Operand("scales", s.f32, {&s.t, &s.s});
  s.ForEachPlanField([&](const char* name, Types& types, std::initializer_list<Size*> dims) {
    check.Operand(name, types, dims);
  });
  if (config.has_weights) check.Operand("topk_weights", s.f32, {&s.t, &s.k});
  check.Result("rows", s.row, {&s.m, &s.h});
  if (config.is_quantized) check.Result("row_scales", s.f32, {&s.m, &s.s});
  if (config.has_weights) check.Result("row_weights", s.f32, {&s.m});
  return s.Finish(kRedispatchTarget, config, check, shape);
}

Status CheckCombine(const TransferConfig& config, Buffers operands, Buffers results,
                    TransferShape* shape) {
  BufferChecker check(kCombineTarget, operands, results);
  TransferSymbols s(config);
  check.Operand("y", s.row, {&s.m, &s.h});
  s.ForEachPlanField([&](const char* name, Types& types, std::initializer_list<Size*> dims) {
    check.Operand(name, types, dims);
  });
  if (config.has_weights) check.Operand("row_weights", s.f32, {&s.m});
  if (config.has_scalars) check.Operand("row_scalars", s.f32, {&s.m});
  check.Result("out", s.row, {&s.t, &s.h});
  if (config.has_scalars) check.Result("assignment_scalars", s.f32, {&s.t, &s.k});
  return s.Finish(kCombineTarget, config, check, shape);
}

Status CheckBulkCopyCeiling(const TransferConfig& config, Buffers operands, Buffers results,
                            TransferShape* shape) {
  BufferChecker check(kBulkCopyCeilingTarget, operands, results);
  TransferSymbols s(config);
  check.Operand("x", s.row, {&s.t, &s.h});
  check.Result("status", s.s32, {&s.one});
  Status status = s.Finish(kBulkCopyCeilingTarget, config, check, shape);
  shape->top_k = 1;
  shape->num_rows = 0;
  return status;
}

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
  Types rhs{config.has_accumulator ? static_cast<uint8_t>(kF32) : kRowTypes};
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
  Types lhs{has_blocks ? static_cast<uint8_t>(kF8E4M3) : static_cast<uint8_t>(kF8E4M3 | kF8E5M2)};
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
  Types values{static_cast<uint8_t>(config.is_e5m2 ? kF8E5M2 : kF8E4M3)};
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

}  // namespace jax_ep
