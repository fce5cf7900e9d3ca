// The sizes of a call over several NVLink domains: token chunks, the rings that hold them, and the
// messages of a rail. They follow from static shapes alone, because all ranks have to agree.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LAYOUT_H_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LAYOUT_H_

#include "ffi/device/protocol/control_block.h"
#include "ffi/device/transfer/hierarchical/domains.h"

namespace jax_ep {

// A message is a put of up to this many bytes. Networks reach their rate from some 100 KB on.
inline constexpr int64_t kRailSlotBytes = int64_t{256} << 10;
inline constexpr int64_t kMaxRailBytes = int64_t{128} << 20;  // all receive rings of a rank's rails
inline constexpr int32_t kMaxSlotsPerRail = 256;              // 64 MB: 80 us of NVLink and some
static_assert(kMaxRailSlots * kRailSlotBytes >= kMaxRailBytes);
static_assert(kRailSlotBytes < int64_t{1} << kMessageBytesBits);

// A mask of 64 bits says which tokens of a chunk are in a message.
inline constexpr int32_t kMaxChunkTokens = 64;
// Laps of a ring inside a domain, see ChunkNumber.
inline constexpr int32_t kMaxLaps = 255;

// The begin of every message. It is followed by scalars of tokens, if the call has them, and rows;
// or by counts, routes and weights.
struct alignas(128) MessageHeader {
  uint64_t fingerprint;  // the call's
  uint64_t tokens;       // a bit for each token of the chunk that is in the message
  uint64_t poisoned;     // 1 if a plan in the sender's domain is poisoned
  uint64_t bytes;        // how long the message is
};
inline constexpr int64_t kHeaderBytes = sizeof(MessageHeader);
static_assert(kHeaderBytes == 128);

struct HierarchicalLayout {
  Domains domains;
  int32_t chunk_tokens;          // per chunk
  int32_t num_chunks;            // per rank
  int32_t domain_slots;          // a chunk each, of a ring inside the domain; a power of two
  int32_t rail_slots;            // a message each, of a rail's ring; a power of two
  int32_t metadata_assignments;  // per message of metadata
  int32_t num_metadata;          // messages of metadata, ahead of the chunks
  int64_t rails_offset;          // in the workspace

  JAX_EP_HOST_DEVICE int num_messages() const { return num_metadata + num_chunks; }
  JAX_EP_HOST_DEVICE int64_t send_rings_offset() const {
    return rails_offset + domains.num_rails() * int64_t{rail_slots} * kRailSlotBytes;
  }
  JAX_EP_HOST_DEVICE int ChunkTokens(int chunk, int num_tokens) const {
    return Min(chunk_tokens, num_tokens - chunk * chunk_tokens);
  }
};

// Returns the number of a chunk in a ring inside the domain. Numbers rise with each use of a slot.
JAX_EP_HOST_DEVICE constexpr uint64_t ChunkNumber(uint64_t sequence, int lap) {
  return sequence << 8 | static_cast<uint32_t>(lap + 1);
}
static_assert(kGenerationShift + kGenerationBits + 8 <= 64);

// Returns the largest power of two up to `value`, between `least` and `most`, which are powers,
// too.
constexpr int32_t PowerOfTwo(int64_t value, int32_t least, int32_t most) {
  int32_t power = least;
  while (power < most && 2 * int64_t{power} <= value) power *= 2;
  return power;
}

// Returns the most streams that a role has (streams.cuh): those of combine.
JAX_EP_HOST_DEVICE inline int NumStreams(const Domains& domains, int num_ranks) {
  return num_ranks + 3 * domains.num_rails() + 2;
}

// Returns the slots of a rail's ring: of a group, not of a call, because a rank may send to a
// partner that still runs the call before.
constexpr int32_t RailSlots(int32_t num_domains) {
  return PowerOfTwo(kMaxRailBytes / kRailSlotBytes / (num_domains - 1), 2, kMaxSlotsPerRail);
}

// Returns the bytes of the rings of all rails of a rank: it receives in the first half, and packs
// in the second one what a network is to put.
constexpr int64_t RailBytes(int32_t num_domains) {
  return 2 * (num_domains - 1) * RailSlots(num_domains) * kRailSlotBytes;
}

// Rows that a slot inside the domain has in all rings of a rank: of chunks that the domain's other
// ranks send (dispatch), or of partial sums (combine).
constexpr int64_t DomainSlotRows(const Domains& domains, int64_t chunk_tokens, int64_t top_k) {
  return domains.count * Max(domains.size - 1, Min(top_k, domains.size)) * chunk_tokens;
}

// Returns chunk_tokens = 0 if a row does not fit into a message, or there are too many chunks.
// `rail_slots`, `max_domain_slots` and `max_chunk_tokens` are bounds for tests; 0: none.
inline HierarchicalLayout PlanHierarchicalLayout(int64_t num_tokens, int64_t row_bytes,
                                                 int64_t top_k, int64_t num_experts,
                                                 int64_t num_ranks, int64_t domain_size,
                                                 int64_t rail_slots = 0,
                                                 int64_t max_domain_slots = 0,
                                                 int64_t max_chunk_tokens = 0) {
  // Chunks are so short that ranks receive while they send, and a warp of combine has about one
  // token of each, or two where rings of kMaxDomainSlots hold few of them; but a put has 100 KB and
  // more.
  const int64_t wanted_chunks = domain_size > 1 ? 192 : 384;
  constexpr int64_t kMinTokens = 8;
  constexpr int64_t kTokensAtOnce = 12;  // warps of combine; a multiple of the send warps
  constexpr int64_t kMinChunkBytes = int64_t{128} << 10;
  constexpr int64_t kMaxDomainBytes = int64_t{128} << 20;
  HierarchicalLayout layout = {};
  layout.domains = Domains(static_cast<int32_t>(num_ranks), static_cast<int32_t>(domain_size));
  layout.rail_slots =
      rail_slots > 0 ? static_cast<int32_t>(rail_slots) : RailSlots(layout.domains.count);
  const int64_t fitting = (kRailSlotBytes - 2 * kHeaderBytes) / (row_bytes + top_k * 4);
  const int64_t least =
      num_tokens < wanted_chunks ? kMinTokens : Max(kMinChunkBytes / row_bytes, kMinTokens);
  const int64_t wanted = Max(CeilDivide(num_tokens, wanted_chunks), least);
  const int64_t rounded = CeilDivide(wanted, kTokensAtOnce) * kTokensAtOnce;
  int64_t tokens = Min(Min(fitting, rounded), kMaxChunkTokens);
  if (max_chunk_tokens > 0) tokens = Min(tokens, max_chunk_tokens);
  if (tokens == 0) return layout;
  const int64_t chunks = CeilDivide(num_tokens, tokens);
  const int64_t slot_bytes = DomainSlotRows(layout.domains, tokens, top_k) * row_bytes;
  int64_t slots = PowerOfTwo(kMaxDomainBytes / slot_bytes, 4, kMaxDomainSlots);
  if (max_chunk_tokens > 0) {  // the workspace is for longer chunks
    slots = Min(slots, PowerOfTwo(num_tokens / tokens, 1, kMaxDomainSlots));
  }
  if (max_domain_slots > 0) slots = PowerOfTwo(max_domain_slots, 1, static_cast<int32_t>(slots));
  while (slots < kMaxDomainSlots && slots * kMaxLaps < chunks) slots *= 2;
  if (slots * kMaxLaps < chunks || chunks > kMaxHierarchicalChunks) return layout;
  while (slots / 2 >= chunks && slots > 1) slots /= 2;
  layout.chunk_tokens = static_cast<int32_t>(tokens);
  layout.num_chunks = static_cast<int32_t>(chunks);
  layout.domain_slots = static_cast<int32_t>(slots);
  // Counts are 8 bytes per pair of experts; an assignment has a route of 8 bytes and a weight.
  const int64_t count_bytes = (num_experts + 2) / 2 * 8;
  // Few messages, but several, so that as many blocks pack and spread them.
  constexpr int64_t kWantedMessages = 8;
  constexpr int64_t kMinAssignments = 1024;
  const int64_t fits = (kRailSlotBytes - kHeaderBytes - count_bytes) / 12 / 32 * 32;
  const int64_t per_message = Min(
      Max(CeilDivide(CeilDivide(num_tokens * top_k, kWantedMessages), 32) * 32, kMinAssignments),
      fits);
  layout.metadata_assignments = static_cast<int32_t>(per_message);
  layout.num_metadata = static_cast<int32_t>(Max(CeilDivide(num_tokens * top_k, per_message), 1));
  const int streams = NumStreams(layout.domains, static_cast<int>(num_ranks));
  if (int64_t{streams} * ClaimWords::words_per_stream(layout.num_messages()) > kMaxClaimWords) {
    layout.chunk_tokens = 0;
  }
  return layout;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LAYOUT_H_
