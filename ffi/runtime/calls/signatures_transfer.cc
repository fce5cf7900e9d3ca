#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "ffi/device/common/integers.h"
#include "ffi/runtime/calls/signatures.h"

namespace jax_ep {
namespace {

constexpr uint16_t kQuantizedTypes = kF8E4M3 | kF8E5M2 | kF4E2M1;
constexpr uint16_t kScaleTypes = kF32 | kF8E8M0 | kF8E4M3;

// Kernels move rows in vectors.
constexpr int64_t kRowUnit = kVectorBytes;

// Sizes and types that the buffers of a transfer share.
struct TransferSymbols {
  explicit TransferSymbols(const TransferConfig& transfer)
      : config(transfer),
        l{"L", config.experts_per_rank()},
        l1{"L+1", config.experts_per_rank() + 1},
        row{config.is_quantized ? kQuantizedTypes : kRowTypes} {}

  const TransferConfig& config;

  Size t{"T"}, h{"H"}, k{"K"}, m{"M"}, s{"S"}, l, l1, one{"1", 1}, three{"3", 3};
  Types row, scale{kScaleTypes}, pred{kPred}, s32{kS32}, u32{kU32}, f32{kF32};

  void TokenOperands(BufferChecker& check) {
    check.Operand("x", row, {&t, &h});
    if (config.is_quantized) check.Operand("scales", scale, {&t, &s});
  }

  void RowResults(BufferChecker& check) {
    check.Result("rows", row, {&m, &h});
    if (config.is_quantized) check.Result("row_scales", scale, {&m, &s});
    if (config.has_weights) check.Result("row_weights", f32, {&m});
  }

  void PlanOperands(BufferChecker& check) {
    ForEachPlanField([&](const char* name, Types& types, std::initializer_list<Size*> dims) {
      check.Operand(name, types, dims);
    });
  }

  void PlanResults(BufferChecker& check) {
    ForEachPlanField([&](const char* name, Types& types, std::initializer_list<Size*> dims) {
      check.Result(name, types, dims);
    });
  }

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
    if (config.domain_size == 0) return;
    Size domains{"D", config.group_size / config.domain_size};
    Size words{"ceil(N/32)", CeilDivide(config.domain_size, 32)};
    expect("plan.forwarding.token_ranks", u32, {&domains, &t, &words});
    expect("plan.forwarding.partial_sum_index", s32, {&m});
  }

  Status Finish(std::string_view target, BufferChecker& check, TransferShape* shape) {
    if (Status status = check.Finish(); !status.ok()) return status;
    *shape = {.num_tokens = t.value,
              .hidden = h.value,
              .top_k = k.value,
              .num_experts = config.num_experts,
              .num_ranks = config.group_size,
              .num_rows = m.value,
              .domain_size = config.domain_size,
              .format = {.payload = row.type()}};
    if (config.is_quantized) {
      const int64_t block = ValuesPerScale(scale.type());
      const int64_t blocks = CeilDivide(h.value, block);
      if (s.value != blocks && !(scale.type() == kF32 && s.value == 1)) {
        return InvalidArgument(target, ": a row of ", h.value, " values has ", s.value,
                               " scales; expected ", blocks, " for blocks of ", block,
                               ", or one in f32");
      }
      shape->format = QuantizedRowFormat(row.type(), blocks * block / s.value, scale.type());
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
  s.TokenOperands(check);
  check.Operand("topk_ids", s.s32, {&s.t, &s.k});
  if (config.has_weights) check.Operand("topk_weights", s.f32, {&s.t, &s.k});
  s.RowResults(check);
  s.PlanResults(check);
  return s.Finish(kDispatchTarget, check, shape);
}

Status CheckRedispatch(const TransferConfig& config, Buffers operands, Buffers results,
                       TransferShape* shape) {
  BufferChecker check(kRedispatchTarget, operands, results);
  TransferSymbols s(config);
  s.TokenOperands(check);
  s.PlanOperands(check);
  if (config.has_weights) check.Operand("topk_weights", s.f32, {&s.t, &s.k});
  s.RowResults(check);
  return s.Finish(kRedispatchTarget, check, shape);
}

Status CheckCombine(const TransferConfig& config, Buffers operands, Buffers results,
                    TransferShape* shape) {
  BufferChecker check(kCombineTarget, operands, results);
  TransferSymbols s(config);
  check.Operand("y", s.row, {&s.m, &s.h});
  s.PlanOperands(check);
  if (config.has_weights) check.Operand("row_weights", s.f32, {&s.m});
  if (config.has_scalars) check.Operand("row_scalars", s.f32, {&s.m});
  check.Result("out", s.row, {&s.t, &s.h});
  if (config.has_scalars) check.Result("assignment_scalars", s.f32, {&s.t, &s.k});
  return s.Finish(kCombineTarget, check, shape);
}

Status CheckTransferDone(const TransferDoneConfig& config, Buffers operands, Buffers results,
                         NoSizes* /*sizes*/) {
  const auto count = static_cast<size_t>(config.num_results);
  if (results.size() != count || operands.size() <= count) {
    return InvalidArgument(
        kTransferDoneTarget, ": there are ", operands.size(), " operands and ", results.size(),
        " results; expected the ", count,
        " results that are returned, the other results and the operands of a start");
  }
  for (size_t i = 0; i < count; ++i) {
    if (operands[i].type == results[i].type &&
        std::ranges::equal(operands[i].dims, results[i].dims)) {
      continue;
    }
    return InvalidArgument(kTransferDoneTarget, ": result ", i,
                           " differs from the start's in type or shape; expected the same");
  }
  return {};
}

Status CheckBulkCopyCeiling(const TransferConfig& config, Buffers operands, Buffers results,
                            TransferShape* shape) {
  BufferChecker check(kBulkCopyCeilingTarget, operands, results);
  TransferSymbols s(config);
  check.Operand("x", s.row, {&s.t, &s.h});
  check.Result("status", s.s32, {&s.one});
  Status status = s.Finish(kBulkCopyCeilingTarget, check, shape);
  shape->top_k = 1;
  shape->num_rows = 0;
  return status;
}

}  // namespace jax_ep
