#include "ffi/runtime/signatures.h"

#include <initializer_list>
#include <string_view>

namespace jax_ep {
namespace {

constexpr uint8_t kRowTypes = kBF16 | kF16 | kF32;

// Rows move in units of 16 bytes.
constexpr int64_t kRowUnit = 16;

// The names that the buffers of dispatch and combine share.
struct TransferSymbols {
  explicit TransferSymbols(const TransferConfig& config)
      : l{"L", config.experts_per_rank()}, l1{"L+1", config.experts_per_rank() + 1} {}

  Size t{"T"}, h{"H"}, k{"K"}, m{"M"}, l, l1, one{"1", 1}, three{"3", 3};
  Types row{kRowTypes}, pred{kPred}, s32{kS32}, f32{kF32};

  // The fields of a plan in order; `expect` checks the next operand or the next result.
  template <typename Expect>
  void ForEachPlanField(const Expect& expect) {
    expect("plan.group_sizes", s32, {&l});
    expect("plan.real_group_sizes", s32, {&l});
    expect("plan.row_offsets", s32, {&l1});
    expect("plan.row_source", s32, {&m, &three});
    expect("plan.row_slot", s32, {&m});
    expect("plan.kept", pred, {&t, &k});
    expect("plan.destination", s32, {&t, &k});
    expect("plan.num_received", s32, {&one});
    expect("plan.num_dropped", s32, {&one});
    expect("plan.num_bad_ids", s32, {&one});
    expect("plan.status", s32, {&one});
  }

  Status Finish(std::string_view target, BufferChecker& check, TransferSizes* sizes) {
    if (Status status = check.Finish(); !status.ok()) return status;
    *sizes = {t.value, h.value, k.value, m.value, row.type()};
    if (const int64_t bytes = h.value * ElementBytes(row.type()); bytes % kRowUnit != 0) {
      return Unimplemented(target, ": a row of ", h.value, " elements has ", bytes,
                           " bytes; the kernels take multiples of ", kRowUnit,
                           ". Pad the hidden size, or use implementation=\"xla\"");
    }
    return {};
  }
};

}  // namespace

Status CheckDispatch(const TransferConfig& config, Buffers operands, Buffers results,
                     TransferSizes* sizes) {
  BufferChecker check(kDispatchTarget, operands, results);
  TransferSymbols s(config);
  check.Operand("x", s.row, {&s.t, &s.h});
  check.Operand("topk_ids", s.s32, {&s.t, &s.k});
  if (config.has_weights) check.Operand("topk_weights", s.f32, {&s.t, &s.k});
  check.Result("rows", s.row, {&s.m, &s.h});
  if (config.has_weights) check.Result("row_weights", s.f32, {&s.m});
  s.ForEachPlanField([&](const char* name, Types& types, std::initializer_list<Size*> dims) {
    check.Result(name, types, dims);
  });
  return s.Finish(kDispatchTarget, check, sizes);
}

Status CheckDispatchByPlan(const TransferConfig& config, Buffers operands, Buffers results,
                           TransferSizes* sizes) {
  BufferChecker check(kDispatchByPlanTarget, operands, results);
  TransferSymbols s(config);
  check.Operand("x", s.row, {&s.t, &s.h});
  s.ForEachPlanField([&](const char* name, Types& types, std::initializer_list<Size*> dims) {
    check.Operand(name, types, dims);
  });
  if (config.has_weights) check.Operand("topk_weights", s.f32, {&s.t, &s.k});
  check.Result("rows", s.row, {&s.m, &s.h});
  if (config.has_weights) check.Result("row_weights", s.f32, {&s.m});
  return s.Finish(kDispatchByPlanTarget, check, sizes);
}

Status CheckCombine(const TransferConfig& config, Buffers operands, Buffers results,
                    TransferSizes* sizes) {
  BufferChecker check(kCombineTarget, operands, results);
  TransferSymbols s(config);
  check.Operand("y", s.row, {&s.m, &s.h});
  s.ForEachPlanField([&](const char* name, Types& types, std::initializer_list<Size*> dims) {
    check.Operand(name, types, dims);
  });
  if (config.has_weights) check.Operand("row_weights", s.f32, {&s.m});
  if (config.has_scalars) check.Operand("row_scalars", s.f32, {&s.m});
  check.Result("out", s.row, {&s.t, &s.h});
  if (config.has_scalars) check.Result("choice_scalars", s.f32, {&s.t, &s.k});
  return s.Finish(kCombineTarget, check, sizes);
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
  Types lhs{kRowTypes}, rhs{kRowTypes}, out{kRowTypes}, s32{kS32};
  check.Operand("lhs", lhs, {&m, &k});
  check.Operand("out_gradient", out, {&m, &n});
  check.Operand("group_sizes", s32, {&l});
  check.Result("rhs_gradient", rhs,
               {&l, config.transpose_rhs ? &n : &k, config.transpose_rhs ? &k : &n});
  if (Status status = check.Finish(); !status.ok()) return status;
  *sizes = {l.value, m.value, k.value, n.value, lhs.type(), rhs.type(), out.type()};
  return {};
}

}  // namespace jax_ep
