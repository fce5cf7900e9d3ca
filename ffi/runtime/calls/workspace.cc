#include "ffi/runtime/calls/workspace.h"

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <limits>

#include "ffi/device/transfer/dispatch/token_chunks.h"
#include "ffi/device/transfer/eager_layout.h"
#include "ffi/runtime/calls/config.h"

namespace jax_ep {
namespace {

constexpr int64_t kIndexBytes = sizeof(int32_t);
constexpr int64_t kScalarBytes = sizeof(float);
constexpr int64_t kMaxAssignments = std::numeric_limits<int32_t>::max();

// A non-negative 64-bit size that remembers overflow.
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

Status CheckShape(const TransferShape& shape) {
  const struct {
    const char* name;
    int64_t value, least, most;
  } limits[] = {
      {"num_tokens", shape.num_tokens, 0, kMaxAssignments},
      {"hidden", shape.hidden, 1, kMaxWorkspaceBytes},
      {"top_k", shape.top_k, 1, kMaxAssignments},
      {"num_experts", shape.num_experts, 1, kMaxAssignments},
      {"num_ranks", shape.num_ranks, 1, kMaxRanks},
      {"the size of a row element in bits", ElementBits(shape.format.payload), 4, 32},
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
  if (shape.num_tokens * shape.top_k > kMaxAssignments) {
    return InvalidArgument("num_tokens * top_k is ", shape.num_tokens * shape.top_k,
                           "; expected at most ", kMaxAssignments,
                           ", because the index of an assignment has 32 bits");
  }
  if (shape.has_domains() && (shape.domain_size < 1 || shape.domain_size >= shape.num_ranks ||
                              shape.num_ranks % shape.domain_size != 0)) {
    return InvalidArgument("domain_size is ", shape.domain_size,
                           "; expected a divisor of num_ranks, which is ", shape.num_ranks,
                           ", and less than it");
  }
  return {};
}

}  // namespace

Status PlanHierarchicalLayout(const TransferShape& shape, int64_t rail_slots, int64_t ring_chunks,
                              int64_t chunk_tokens, HierarchicalLayout* layout) {
  *layout = PlanHierarchicalLayout(shape.num_tokens, shape.wire_bytes(), shape.top_k,
                                   shape.num_experts, shape.num_ranks, shape.domain_size,
                                   rail_slots, ring_chunks, chunk_tokens);
  const int64_t rails = layout->domains.num_rails();
  if (rails >= kMaxDomains || rails * layout->rail_slots > kMaxRailSlots) {
    return Unimplemented("there are ", rails + 1, " NVLink domains; the kernels take up to ",
                         kMaxDomains);
  }
  if (layout->chunk_tokens == 0) {
    return Unimplemented("a row of ", shape.wire_bytes(), " bytes, or ", shape.num_tokens,
                         " tokens per rank, are more than transfers between NVLink domains take");
  }
  return {};
}

int64_t RailsOffset() {
  TransferShape any;
  any.num_tokens = any.hidden = any.top_k = any.domain_size = 1;
  any.num_experts = any.num_ranks = 2;
  any.format = kFloat32Rows;
  WorkspaceLayout layout;
  return PlanWorkspace(any, &layout).ok() ? layout.rails.offset : 0;
}

Status PlanWorkspace(const TransferShape& shape, WorkspaceLayout* layout) {
  if (Status status = CheckShape(shape); !status.ok()) return status;
  const int64_t tokens = shape.num_tokens;
  const int64_t assignments = tokens * shape.top_k;
  const int64_t ranks = shape.num_ranks;
  const Bytes row({shape.wire_bytes()});
  if (row.too_large()) return InvalidArgument("hidden is ", shape.hidden, ", which is too large");
  int64_t received_rows, scalars, rail_bytes = 0;
  if (shape.has_domains()) {
    HierarchicalLayout domains;
    if (Status status = PlanHierarchicalLayout(shape, 0, 0, 0, &domains); !status.ok())
      return status;
    const int64_t chunk_tokens = int64_t{domains.domain_slots} * domains.chunk_tokens;
    received_rows = DomainSlotRows(domains.domains, chunk_tokens, shape.top_k);
    scalars = domains.domains.count * chunk_tokens * shape.top_k;
    rail_bytes = RailBytes(domains.domains.count) + DomainEagerBytes(ranks);
  } else {
    const TokenChunks chunks = PlanTokenChunks(tokens, row.value(), ranks, shape.top_k);
    received_rows =
        std::max((ranks - 1) * chunks.ring_slots, tokens * std::min(shape.top_k, ranks));
    scalars = assignments;
  }

  const struct {
    WorkspaceBufferId buffer;
    const char* name;
    Bytes bytes;
  } needs[] = {
      // Stores to these do not wait for the receiver. The sizes do not depend on the shape.
      {kEagerRows, "eager_rows", Bytes({2, kEagerRowBytes})},
      {kEagerPackets, "eager_packets",
       Bytes({2, kMaxLowLatencyAssignments, sizeof(AssignmentPacket)})},
      {kEagerFlags, "eager_flags", Bytes({2, kMaxLowLatencySegments, sizeof(uint64_t)})},
      // Peers store to these. In a dispatch, received_rows is the receive ring of every peer; in a
      // combine it has the partial sums of this rank's tokens, min(K, R) for each. With several
      // domains it is rings, in a combine too.
      {kReceivedRows, "received_rows", Bytes({received_rows, row.value()})},
      {kRoutes, "routes", Bytes({ranks, assignments, sizeof(Route)})},
      {kReceivedWeights, "received_weights", Bytes({ranks, assignments, kScalarBytes})},
      {kAssignmentScalars, "assignment_scalars", Bytes({scalars, kScalarBytes})},
      // Private to the rank during a call.
      {kTileCounts, "tile_counts", Bytes({kMaxTiles, shape.num_experts + 2, kIndexBytes})},
      {kAssignmentRows, "assignment_rows", Bytes({ranks, assignments, kIndexBytes})},
  };
  static_assert(std::size(needs) == kNumBuffers);

  WorkspaceLayout planned;
  for (const auto& [buffer, name, need] : needs) {
    const Bytes bytes = need.RoundUp(kWorkspaceAlignment);
    if (bytes.too_large() || planned.bytes + bytes.value() > kMaxWorkspaceBytes) {
      return InvalidArgument("the workspace would be larger than ", kMaxWorkspaceBytes >> 40,
                             " TiB at its buffer ", name, " (", shape.num_tokens,
                             " tokens per rank, hidden size ", shape.hidden, ", top-k ",
                             shape.top_k, ", ", shape.num_ranks, " ranks)");
    }
    planned.buffers[buffer] = {name, planned.bytes, bytes.value()};
    planned.bytes += bytes.value();
    if (buffer == kEagerFlags) {  // after all buffers that have one size for all shapes
      planned.rails = {"rails", planned.bytes, rail_bytes};
      planned.bytes += rail_bytes;
    }
  }
  *layout = planned;
  return {};
}

}  // namespace jax_ep
