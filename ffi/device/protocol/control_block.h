// The control block of one device in one group of ranks: the only address that transfer kernels
// receive. It is device memory, never moved or freed before exit, because captured CUDA graphs keep
// the address. Kernels find everything else through it at run time. Only this device writes it.
//
// The inbox is what peers write. Each generation has new inboxes, so a rank that is late cannot
// write into the next one.
#ifndef JAX_EP_DEVICE_PROTOCOL_CONTROL_BLOCK_H_
#define JAX_EP_DEVICE_PROTOCOL_CONTROL_BLOCK_H_

#include <cstddef>

#include "ffi/device/common/integers.h"
#include "ffi/device/common/limits.h"
#include "ffi/device/protocol/rail_requests.h"
#include "ffi/device/protocol/symmetric_rails.h"

namespace jax_ep {

enum class Operation : uint32_t { kDispatch, kRedispatch, kCombine, kBulkCopyCeiling };

// The points of a call at which a rank waits for all of its peers.
enum class WaitPoint : uint32_t {
  kEntry,   // every peer has entered this call
  kChunk,   // every peer has sent its rows of a token chunk
  kCredit,  // every peer has expanded a token chunk of this rank, so its ring slots may be reused
};

// Sequence numbers count the calls of a generation, from 1. Their high bits are the generation's
// number, so they rise from one generation to the next.
inline constexpr int kGenerationShift = 40;
inline constexpr int kGenerationBits = 16;
inline constexpr uint64_t kMaxGeneration = (uint64_t{1} << kGenerationBits) - 1;
JAX_EP_HOST_DEVICE constexpr uint64_t FirstSequence(uint64_t generation) {
  return (generation << kGenerationShift) + 1;
}

// Returns how many calls of its generation a call follows.
JAX_EP_HOST_DEVICE constexpr uint64_t CompletedCalls(uint64_t sequence) {
  return (sequence - 1) & ((uint64_t{1} << kGenerationShift) - 1);
}

// The claim of a control block (claim.cuh): how many calls of the generation have ended, and the
// tag of the call that runs.
inline constexpr int kClaimShift = 25;
inline constexpr uint64_t kClaimOfHost = uint64_t{1} << 24;  // a generation starts
inline constexpr uint64_t kClaimTags = kClaimOfHost - 1;
inline constexpr int kClaimTagWeight = 12;  // bits that are set in every tag

// Returns the tag of a call. Calls of one program have different ones, up to 4096 of them.
constexpr uint32_t ClaimTag(uint64_t call_site) {
  const auto number = static_cast<uint32_t>(call_site) & 0xfff;
  return number << 12 | (~number & 0xfff);
}

// The result of a wait; also the value of the abort word and, except kPoisoned, of plan.status. A
// poisoned plan is one whose status is not 0: it comes from a call that failed.
enum class Outcome : uint32_t {
  kArrived = 0,
  kTimeout = 1,      // a rank of the group has missed a deadline
  kMismatch = 2,     // a peer runs another operation, or the same one with other shapes
  kNoWorkspace = 3,  // the workspace was released, or is too small for this call
  kPoisoned = 4,     // a rank was given a poisoned plan; later calls are not affected
  kHostAbort = 5,    // the host has ended the calls of this generation
  kConcurrent = 6,   // another call of the control block was running
};

// Written by one peer. Each peer has a cache line of its own, so that polls do not collide.
struct alignas(128) EntryFlags {
  uint64_t sequence;     // written last, with release
  uint64_t fingerprint;  // the call's; valid once `sequence` has arrived
  uint64_t poisoned;     // 1 if the peer's plan is poisoned; likewise
};

// Tiles of assignments, counted by one block each.
inline constexpr int kMaxTiles = 128;

// Chunks of a rank's tokens. A receiver uses the rows of a chunk as soon as the chunk is complete.
inline constexpr int kMaxChunks = 32;

// Sequence numbers by peer and chunk.
using ChunkFlags = uint64_t[kMaxRanks][kMaxChunks];

// Work counters of the running kernel. All are zero between kernels.
struct Progress {
  uint32_t block_tickets;                      // prologue items handed out to blocks
  uint32_t items_finished;                     // prologue items
  uint32_t warp_tickets;                       // items handed out to warps
  uint32_t low_latency_tickets;                // the same, drawn before the claim is known
  uint32_t send_tickets;                       // tokens handed out to sending warps
  uint32_t fill_tickets;                       // items of FillEmptyRows
  uint32_t sender_tickets;                     // warps that asked to become senders
  uint32_t failure;                            // an Outcome, recorded by any warp
  uint32_t chunk_tokens_expanded[kMaxChunks];  // tokens of all peers
  // Sends, by destination; dispatch: [0] for all.
  uint32_t chunk_items_finished[kMaxRanks][kMaxChunks];

  // The number of words that calls of a group use, from the first one.
  JAX_EP_HOST_DEVICE static constexpr int UsedWords(int num_ranks);
};

// The slots of a ring inside a domain, and the numbers of chunks by ring and slot.
inline constexpr int kMaxDomainSlots = 128;
using DomainFlags = uint64_t[kMaxRanks][kMaxDomainSlots];

// Chunks of a rank's tokens in a call over several domains.
inline constexpr int kMaxHierarchicalChunks = 1 << 14;

// The claims of work items of some streams (transfer/hierarchical/streams.cuh).
inline constexpr int kMaxStreams = 1024;
inline constexpr int kMaxClaimWords = 1 << 14;
struct ClaimWords {
  uint32_t first_words[kMaxStreams];
  uint64_t bits[kMaxClaimWords];

  JAX_EP_HOST_DEVICE static constexpr int words_per_stream(int num_items) {
    return Max(CeilDivide(num_items, 64), 1);  // streams of one item may be beside empty ones
  }
};

// Work counters of a running call over several domains. All are zero between kernels.
struct HierarchicalProgress {
  ClaimWords send_claims;
  ClaimWords receive_claims;
  uint32_t metadata_tickets;
  uint64_t own_sums[kMaxHierarchicalChunks / 64];  // combine: chunks, one per bit
  uint32_t metadata_spread[kMaxRanks];             // messages of metadata, by rail
  uint32_t slot_reads[kMaxRailSlots];  // messages read once of twice: to forward and to expand
};

// Host-mapped memory that describes a wait. As `report` it is why a call was aborted, at most once
// per generation. As `warning` it is a wait that takes long, rewritten once the host has read the
// last one.
struct AbortRecord {
  uint32_t posted;  // written last, with release
  int32_t rank;     // the waiting rank
  int32_t peer;     // the missing peer; `rank` itself if the outcome is kNoWorkspace
  Operation operation;
  WaitPoint wait_point;
  Outcome outcome;
  uint64_t sequence;
  uint64_t generation;
};

struct Inbox {
  // Written by peers, by this device and by the host: an Outcome, 0 while there is no failure. It
  // is sticky.
  alignas(128) uint32_t abort;
  // Double-buffered by the sequence number, modulo 2. A rank signals before it waits, so it may
  // signal entry of the next call while its peers still compare the flags of this one.
  EntryFlags entry[2][kMaxRanks];
  alignas(128) ChunkFlags chunks_sent;  // to this rank, by each peer
  alignas(128) ChunkFlags credits;      // for chunks of this rank, from each peer

  // Calls over several domains. Inside the domain: ChunkNumbers by ring and slot. Of rails: numbers
  // of messages, which go on over the calls of a generation.
  alignas(128) DomainFlags domain_chunks;
  alignas(128) DomainFlags domain_credits;
  alignas(128) uint64_t rail_messages[kMaxRailSlots];  // arrived here
  alignas(128) uint64_t rail_credits[kMaxRailSlots];   // for messages of this rank
  // By domain: the first call of the generation that a partner over a network does not make, or 0.
  alignas(128) uint64_t rail_leaves[kMaxDomains];
};
// A network writes 8 bytes at once, and none of the entry flags with the abort word.
static_assert(offsetof(Inbox, entry) >= sizeof(uint64_t));

struct Peer {
  Inbox* inbox;
  unsigned char* workspace;
};

// Shared by all calls of a generation. StartGeneration copies it into the control block,
// between two calls.
struct GenerationState {
  // One sector of the L1 cache: the load of the generation's number loads the rest (claim.cuh).
  uint64_t generation;  // 0 before the first one
  int32_t rank;
  int32_t num_ranks;
  uint64_t workspace_bytes;  // every rank's; 0 if there is none
  unsigned char* workspace;  // this rank's own, also in `peers`

  Inbox* inbox;                   // likewise
  int32_t num_peers;              // members of the generation besides this rank
  uint8_t peer_ranks[kMaxRanks];  // theirs; each rank begins with the one after it
  uint64_t entry_deadline_ns;
  uint64_t progress_deadline_ns;
  uint64_t warning_ns;    // a wait that takes longer is reported to the host, and continues
  uint64_t max_delay_ns;  // test only: random delay before waits and signals; 0 otherwise
  AbortRecord* report;    // or null
  AbortRecord* warning;   // or null
  Peer peers[kMaxRanks];  // indexed by rank, this one included
  // By what a network reaches the rail partners (rail_network.cuh). Then the peers are those of the
  // rank's domain. Null if this rank reaches the memory of all ranks.
  union {
    RailRequests* rail_requests;            // a thread of the host
    const SymmetricRails* symmetric_rails;  // NVSHMEM, only with kernels that are compiled for it
  };
};

// Makes all ranks of a group members of the generation.
inline void SetAllPeers(GenerationState* state) {
  state->num_peers = state->num_ranks - 1;
  for (int i = 0; i < state->num_peers; ++i) {
    state->peer_ranks[i] = static_cast<uint8_t>((state->rank + 1 + i) % state->num_ranks);
  }
}

// Makes the ranks of a rank's NVLink domain its peers. The memory of others is not reached.
inline void SetDomainPeers(GenerationState* state, int domain_size) {
  const int first = state->rank / domain_size * domain_size;
  state->num_peers = domain_size - 1;
  for (int i = 0; i < state->num_peers; ++i) {
    state->peer_ranks[i] =
        static_cast<uint8_t>(first + (state->rank - first + 1 + i) % domain_size);
  }
  int rank = 0;
  for (Peer& peer : state->peers) {
    if (rank++ / domain_size * domain_size != first) peer = {};
  }
}

struct ControlBlock : GenerationState {
  // Written by transfer kernels.
  alignas(128) uint64_t claim;
  uint64_t last_ended;                    // sequence number of the last call that has ended
  uint32_t contested_owner;               // the tag that has a contested claim, or 0
  alignas(128) uint32_t blocks_finished;  // in the running kernel; 0 between kernels
  alignas(128) uint64_t warned;           // sequence and wait point of the latest warning
  alignas(128) Progress progress;
  alignas(128) uint64_t tiles_counted[kMaxTiles];  // sequence of the latest call that counted each
  // Of calls over several domains.
  alignas(128) uint64_t rail_messages;  // each rail's, in earlier calls of the generation
  alignas(128) HierarchicalProgress hierarchical;
};

constexpr int Progress::UsedWords(int num_ranks) {
  constexpr int kLast = kMaxRanks * kMaxChunks;  // words of the last member
  return static_cast<int>(sizeof(Progress) / 4) - kLast + num_ranks * kMaxChunks;
}

static_assert(kMaxRanks - 1 <= UINT8_MAX, "a rank fits into a byte");
static_assert(sizeof(EntryFlags) == 128, "each peer's entry flags have a cache line of their own");
static_assert(sizeof(Inbox) % 128 == 0, "an inbox is whole cache lines");
static_assert(sizeof(ControlBlock) % 128 == 0, "the control block is whole cache lines");
static_assert(sizeof(Progress) % 4 == 0, "FinishCall zeroes Progress word by word");

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_CONTROL_BLOCK_H_
