// The control block of one device in one group: the one address that transfer kernels receive.
// Device memory, mapped by all peers, allocated once and never moved or freed before exit, because
// captured graphs keep the address for ever. Everything else is found through it at run time.
#ifndef JAX_EP_DEVICE_PROTOCOL_CONTROL_BLOCK_H_
#define JAX_EP_DEVICE_PROTOCOL_CONTROL_BLOCK_H_

#include "ffi/device/common/integers.h"
#include "ffi/device/common/limits.h"

namespace jax_ep {

enum class Operation : uint32_t { kDispatch, kRedispatch, kCombine, kBulkCopyCeiling };

// The points of a call where ranks wait for each other, and what a rank waits for there.
enum class WaitPoint : uint32_t {
  kEntry,   // every peer has entered this call
  kChunk,   // every peer has sent what it has for me of a part of its tokens, or of mine
  kCredit,  // every peer has brought a part of my tokens, whose places others take then
};

// How a wait_point was passed; also the value of the abort word and, if not kPoisoned, of
// plan.status.
enum class Outcome : uint32_t {
  kArrived = 0,
  kTimeout = 1,      // a peer missed a deadline, here or elsewhere in the group
  kMismatch = 2,     // a peer runs another operation, or the same with other shapes
  kNoWorkspace = 3,  // the workspace was released, or is too small for this call
  kPoisoned = 4,     // a peer was given a plan whose status is not 0; ends no later call
};

// What a peer writes into my block, alone in its cache line so that polls do not collide.
struct alignas(128) EntryFlags {
  uint64_t sequence;     // written last, with release
  uint64_t fingerprint;  // of the call; ready lines only
  uint64_t poisoned;     // 1 if the peer's plan has a status; ready lines only
};

// Tiles of choices that are counted by one block each.
inline constexpr int kMaxTiles = 128;

// Chunks of a rank's tokens: these, or their partial rows, are used as soon as all of a chunk are
// there.
inline constexpr int kMaxChunks = 32;

// Epochs, of each rank's chunks or of what each rank does with mine.
using ChunkFlags = uint64_t[kMaxRanks][kMaxChunks];

// Parts of a call that one kernel hands out to its blocks, counted. All zero between kernels.
struct Progress {
  uint32_t tickets;                                 // handed out to blocks
  uint32_t finished;                                // of these tickets
  uint32_t warp_tickets;                            // handed out to warps
  uint32_t send_tickets;                            // and to those that send, in a dispatch
  uint32_t fill_tickets;                            // and of what is filled
  uint32_t senders;                                 // warps that came to send
  uint32_t failure;                                 // an Outcome: of a wait of any warp
  uint32_t chunks_finished[kMaxRanks][kMaxChunks];  // parts of what goes to a rank, or all (0)
  uint32_t chunks_expanded[kMaxChunks];             // tokens of what comes from all ranks
};

// Host-mapped memory: whom a rank waits for, or why it gave up. The device writes one of the second
// kind at most once a generation, and one of the first kind when the host has read the last.
struct AbortRecord {
  uint32_t posted;  // written last, with release
  int32_t rank;     // that waits, or waited
  int32_t peer;     // that it waited for; itself if the outcome is kNoWorkspace
  Operation operation;
  WaitPoint wait_point;
  Outcome outcome;
  uint64_t sequence;
  uint64_t generation;
};

struct ControlBlock;

struct Peer {
  ControlBlock* control;
  unsigned char* workspace;
};

struct ControlBlock {
  // Written by the host while no kernel of the group runs. A new generation starts with everything
  // below this section zero on all ranks, before any of them launches.
  uint64_t generation;
  int32_t rank;
  int32_t num_ranks;
  uint64_t workspace_bytes;  // of every rank; 0 while there is none
  uint64_t entry_deadline_ns;
  uint64_t progress_deadline_ns;
  uint64_t warning_ns;    // a wait that takes longer is told to the host, and goes on
  uint64_t max_delay_ns;  // for tests: waits and signals are late by up to this; 0 normally
  AbortRecord* report;    // or null
  AbortRecord* warning;   // or null
  Peer peers[kMaxRanks];  // by rank, mine included

  // Written by kernels of this device.
  alignas(128) uint64_t sequence;         // calls completed; the running call is one more
  alignas(128) uint32_t blocks_finished;  // of the running kernel; 0 between kernels
  alignas(128) uint64_t warned;  // the latest wait_point and sequence that the host was told of
  alignas(128) Progress progress;
  alignas(128) uint64_t tiles_counted[kMaxTiles];  // the latest sequence in which each was

  // Written by peers; the abort word by this device, too. An Outcome, 0 while all is well; sticky.
  alignas(128) uint32_t abort;
  // By the sequence's parity: nobody waits before it signals, and its peers may still compare the
  // last call's line.
  EntryFlags entry[2][kMaxRanks];
  alignas(128) ChunkFlags chunks_sent;  // by each rank
  alignas(128) ChunkFlags credits;      // by each rank, of what I sent
};

static_assert(sizeof(EntryFlags) == 128);
static_assert(sizeof(ControlBlock) % 128 == 0);

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_CONTROL_BLOCK_H_
