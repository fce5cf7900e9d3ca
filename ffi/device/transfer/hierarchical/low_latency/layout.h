// Low-latency calls over several NVLink domains: latency, not bandwidth, determines their time.
// Rows are in segments, as in low_latency/layout.h. A rank stores them to the eager buffers of its
// domain, and packs them into the messages of its rails, without a wait. Partners send them on
// inside their domains. The first message of a rail is metadata, the others are token chunks.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_LAYOUT_H_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_LAYOUT_H_

#include "ffi/device/transfer/hierarchical/layout.h"
#include "ffi/device/transfer/low_latency/layout.h"

namespace jax_ep {

// The eager buffers of a group with domains follow the rings of its rails: rows, counts, packets
// and flags, double-buffered (eager_layout.h). Here is what each has per rank of the group.
inline constexpr int64_t kDomainEagerRowBytes = int64_t{2} << 20;  // for a rank's tokens
inline constexpr int64_t kMaxDomainEagerAssignments = 4096;        // T * K
inline constexpr int64_t kMaxDomainEagerSegments = 2048;           // T * segments per row
inline constexpr int64_t kDomainEagerCountBytes =
    (CountPairs(kMaxExperts) * int64_t{sizeof(CountPacket)} + 127) / 128 * 128;
inline constexpr int64_t kDomainEagerPacketBytes =
    kMaxDomainEagerAssignments * int64_t{sizeof(AssignmentPacket)};
inline constexpr int64_t kDomainEagerFlagBytes =
    kMaxDomainEagerSegments * int64_t{sizeof(uint64_t)};
inline constexpr int64_t kDomainEagerBytes =
    kDomainEagerRowBytes + kDomainEagerCountBytes + kDomainEagerPacketBytes + kDomainEagerFlagBytes;

// 64 ranks of 128 tokens. Larger groups have no low-latency calls, and no memory for them.
inline constexpr int64_t kMaxLowLatencyRanks = 64;
inline constexpr int64_t kMaxLowLatencyTokens = 128;

constexpr int64_t DomainEagerBytes(int64_t num_ranks) {
  return num_ranks <= kMaxLowLatencyRanks ? 2 * num_ranks * kDomainEagerBytes : 0;
}

// A warp looks at all domains at once, and at all ranks of one.
inline constexpr int32_t kMaxLowLatencyDomains = 32;
inline constexpr int32_t kMaxLowLatencyDomainSize = 32;

// A route in 32 bits. Bad ids have no expert.
JAX_EP_HOST_DEVICE constexpr uint32_t PackRoute(int32_t expert, int32_t position) {
  return static_cast<uint32_t>(position) << 16 | (static_cast<uint32_t>(expert) & 0xffffu);
}
JAX_EP_HOST_DEVICE constexpr int32_t ExpertOf(uint32_t route) {
  return static_cast<int32_t>(route & 0xffffu);
}
JAX_EP_HOST_DEVICE constexpr int32_t PositionOf(uint32_t route) {
  return static_cast<int32_t>(route >> 16);
}
static_assert(kMaxExperts < 0xffff, "-1 is no expert");
static_assert(kMaxDomainEagerAssignments <= 0x10000, "a position has 16 bits");

// The sizes of a low-latency call over several domains.
struct HierarchicalSegments {
  RowSegments segments;  // none: not a low-latency call
  int64_t eager_offset;  // in the workspace
  FastDivmod chunk_tokens_divmod;
  FastDivmod num_rails_divmod;
  FastDivmod num_neighbors_divmod;  // divides by N - 1, or 1
  FastDivmod num_ranks_divmod;

  // Returns the chunk of a token. Messages of chunks follow the one of metadata.
  JAX_EP_HOST_DEVICE int Chunk(int token) const { return chunk_tokens_divmod.Quotient(token); }
  JAX_EP_HOST_DEVICE int IndexInChunk(int token) const {
    return chunk_tokens_divmod.Remainder(token);
  }
  JAX_EP_HOST_DEVICE static int MessageOf(int chunk) { return 1 + chunk; }
};

// The parts of a dispatch's or redispatch's message of metadata, after its header.
struct MetadataParts {
  int64_t routes;   // uint32_t[T * K], see PackRoute
  int64_t weights;  // float[T * K]
  int64_t bytes;

  JAX_EP_HOST_DEVICE MetadataParts(int32_t count_pairs, bool has_routes, bool has_weights,
                                   int32_t num_assignments)
      : routes(kHeaderBytes + count_pairs * int64_t{sizeof(uint64_t)}),
        weights(routes + (has_routes ? num_assignments * int64_t{sizeof(uint32_t)} : 0)),
        bytes(weights + (has_weights ? num_assignments * int64_t{sizeof(float)} : 0)) {}
};
static_assert(kHeaderBytes + CountPairs(kMaxExperts) * 8 + kMaxDomainEagerAssignments * 8 <=
                  kRailSlotBytes,
              "metadata fit into one message");

// Plans about two segments per warp of a large GPU. Returns no segments for calls that are not
// low-latency ones, which follows from static shapes alone, because all ranks have to agree.
//
// Messages are packed without regard to what the partner does, so a ring has to hold those of two
// calls; and their credits are returned when the call ends.
inline RowSegments PlanHierarchicalSegments(const HierarchicalLayout& layout, int64_t num_ranks,
                                            int64_t num_tokens, int64_t top_k, int64_t row_vectors,
                                            int64_t num_scale_words) {
  constexpr int64_t kWanted = 4096;
  constexpr int64_t kMinVectors = 64;
  const int64_t wire_vectors = row_vectors + CeilDivide(num_scale_words, 4);
  if (num_ranks > kMaxLowLatencyRanks || num_tokens < 1 || num_tokens > kMaxLowLatencyTokens ||
      row_vectors < 1 || top_k > kMaxLowLatencyTopK ||
      num_tokens * top_k > kMaxDomainEagerAssignments ||
      num_tokens * wire_vectors * 16 > kDomainEagerRowBytes || layout.num_metadata != 1 ||
      layout.num_chunks > kMaxChunks || layout.rail_slots < 2 * layout.num_messages() ||
      layout.domains.count > kMaxLowLatencyDomains ||
      layout.domains.size > kMaxLowLatencyDomainSize) {
    return {};
  }
  const int64_t wanted = CeilDivide(row_vectors, CeilDivide(kWanted, num_ranks * num_tokens));
  const int64_t vectors = Min(Max(wanted, Min(row_vectors, kMinVectors)), kMaxSegmentVectors);
  const int64_t count = CeilDivide(row_vectors, vectors);
  if (num_tokens * count > kMaxDomainEagerSegments) return {};
  if (CeilDivide(num_scale_words, count) > kMaxSegmentScaleWords) return {};
  return {static_cast<int32_t>(count), static_cast<int32_t>(vectors),
          static_cast<int32_t>(num_scale_words)};
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_LAYOUT_H_
