#include "ffi/runtime/workspace.h"

#include <algorithm>
#include <initializer_list>
#include <limits>

#include "ffi/runtime/config.h"

namespace jax_ep {
namespace {

constexpr int64_t kControlBytes = 4096;    // generation, abort word, alive mask, epochs
constexpr int64_t kPeerEntryBytes = 16;    // address and processing element
constexpr int64_t kFlagBytes = 128;        // one cache line a flag, so that polls do not collide
constexpr int64_t kFlagsPerPeer = 4;       // published, read, reduced, taken
constexpr int64_t kCountBytes = 8;         // a row count packed with its epoch
constexpr int64_t kRowListEntryBytes = 8;  // choice, and position within (expert, source)
constexpr int64_t kScalarBytes = 4;        // float32
constexpr int64_t kMaxChoices = std::numeric_limits<int32_t>::max();

// A non-negative 64-bit size; too large stays too large.
class Bytes {
 public:
  explicit Bytes(std::initializer_list<int64_t> factors) {
    for (int64_t factor : factors) overflow_ |= __builtin_mul_overflow(value_, factor, &value_);
  }

  Bytes RoundUp(int64_t unit) const {
    Bytes rounded = *this;
    rounded.overflow_ |= __builtin_add_overflow(value_, unit - 1, &rounded.value_);
    rounded.value_ -= rounded.value_ % unit;
    return rounded;
  }

  bool too_large() const { return overflow_ || value_ > kMaxWorkspaceBytes; }
  int64_t value() const { return value_; }

 private:
  int64_t value_ = 1;
  bool overflow_ = false;
};

Status CheckShape(const WorkspaceShape& shape) {
  const struct {
    const char* name;
    int64_t value, least, most;
  } limits[] = {
      {"num_tokens", shape.num_tokens, 0, kMaxChoices},
      {"hidden", shape.hidden, 1, kMaxWorkspaceBytes},
      {"top_k", shape.top_k, 1, kMaxChoices},
      {"num_experts", shape.num_experts, 1, kMaxChoices},
      {"num_ranks", shape.num_ranks, 1, kMaxRanks},
      {"the size of a row element in bytes", shape.element_bytes, 1, 8},
  };
  for (const auto& limit : limits) {
    if (limit.value < limit.least || limit.value > limit.most) {
      return InvalidArgument(limit.name, " is ", limit.value, "; expected ", limit.least, " to ",
                             limit.most);
    }
  }
  if (shape.num_experts % shape.num_ranks != 0) {
    return InvalidArgument("num_experts is ", shape.num_experts,
                           "; expected a multiple of num_ranks, which is ", shape.num_ranks);
  }
  // Both are below 2^31, so the product cannot overflow.
  if (shape.num_tokens * shape.top_k > kMaxChoices) {
    return InvalidArgument("num_tokens * top_k is ", shape.num_tokens * shape.top_k,
                           "; expected at most ", kMaxChoices,
                           ", because a choice is a 32-bit index");
  }
  return {};
}

}  // namespace

Status PlanWorkspace(const WorkspaceShape& shape, WorkspaceLayout* layout) {
  if (Status status = CheckShape(shape); !status.ok()) return status;
  const int64_t tokens = shape.num_tokens;
  const int64_t choices = tokens * shape.top_k;
  const int64_t ranks = shape.num_ranks;
  const Bytes row = Bytes({shape.hidden, shape.element_bytes}).RoundUp(kWireRowAlignment);
  if (row.too_large()) return InvalidArgument("hidden is ", shape.hidden, ", which is too large");

  const struct {
    const char* name;
    Bytes bytes;
  } needs[] = {
      // Both directions.
      {"control", Bytes({kControlBytes + ranks * kPeerEntryBytes})},
      {"flags", Bytes({ranks, kFlagsPerPeer, kFlagBytes})},
      // Dispatch. Counts come from every rank, for every expert. A list holds the choices that one
      // rank sends here: in the worst case all that it has.
      {"counts", Bytes({ranks, shape.num_experts, kCountBytes})},
      {"row_lists", Bytes({ranks, choices, kRowListEntryBytes})},
      // A token is published once, whoever and however many its receivers are.
      {"published_rows", Bytes({tokens, row.value()})},
      {"published_weights", Bytes({choices, kScalarBytes})},
      // Combine. A token gets one partial sum from every rank that has one of its choices.
      {"partial_rows", Bytes({tokens, std::min(shape.top_k, ranks), row.value()})},
      {"choice_scalars", Bytes({choices, kScalarBytes})},
  };

  WorkspaceLayout planned;
  for (const auto& [name, need] : needs) {
    const Bytes bytes = need.RoundUp(kWorkspaceAlignment);
    if (bytes.too_large() || planned.bytes + bytes.value() > kMaxWorkspaceBytes) {
      return InvalidArgument("the workspace would be larger than ", kMaxWorkspaceBytes >> 40,
                             " TiB at its buffer ", name, " (", shape.num_tokens,
                             " tokens a rank, hidden ", shape.hidden, ", ", shape.top_k,
                             " choices, ", shape.num_ranks, " ranks)");
    }
    planned.buffers.push_back({name, planned.bytes, bytes.value()});
    planned.bytes += bytes.value();
  }
  *layout = std::move(planned);
  return {};
}

}  // namespace jax_ep
