// All that a rank stores to its peers. Nothing else in device code does: a PeerPointer can be
// stored to by the functions of this file only, and nothing can load through it.
//
//   workspace   StoreToPeer     a value, covered by a signal that follows
//               StorePacket     an inline-flag packet, which needs no signal
//               BulkStoreToPeer bytes of shared memory, covered by a signal once they are complete
//               SignalSegment   the flag of a row segment
//   inbox       StoreEntry      the flags of WAIT_ENTRY
//               StoreChunkFlag  the flag of WAIT_CHUNK or WAIT_CREDIT
//               StoreAbort      the abort word
//               StoreDomainFlag, StoreRailFlag   flags of calls over several NVLink domains
#ifndef JAX_EP_DEVICE_PROTOCOL_PEER_STORES_CUH_
#define JAX_EP_DEVICE_PROTOCOL_PEER_STORES_CUH_

#include "ffi/device/protocol/running_call.cuh"
#include "ffi/device/ptx/bulk_copy.cuh"

namespace jax_ep {

// An address in the workspace of a rank. Where rows are stored for any rank, it may also be one of
// this rank's results.
template <typename T>
class PeerPointer {
 public:
  PeerPointer() = default;
  __device__ explicit PeerPointer(T* address) : address_(address) {}

  __device__ PeerPointer operator+(int64_t count) const { return PeerPointer(address_ + count); }
  __device__ explicit operator bool() const { return address_ != nullptr; }

  template <typename Other>
  __device__ PeerPointer<Other> As() const {
    return PeerPointer<Other>(reinterpret_cast<Other*>(address_));
  }

  // Called by one warp. Returns the value of `lane` in all lanes.
  __device__ PeerPointer Shuffle(int lane) const {
    const auto address = reinterpret_cast<uint64_t>(address_);
    return PeerPointer(reinterpret_cast<T*>(__shfl_sync(kFullWarp, address, lane)));
  }

 private:
  template <typename Value>
  friend __device__ void StoreToPeer(PeerPointer<Value> to, const Value& value);
  template <typename Packet>
  friend __device__ void StorePacket(PeerPointer<Packet> to, uint64_t data, uint64_t tag);
  friend __device__ void BulkStoreToPeer(PeerPointer<uint4> to, uint32_t from, uint32_t bytes);
  friend __device__ void SignalSegment(PeerPointer<uint64_t> flag, uint64_t tag);

  T* address_;
};

// Returns a buffer in the workspace of `rank`, which exists (HasWorkspace). Except for eager
// buffers, a store to a peer's buffer has to follow a successful WaitForEntry.
template <typename T>
__device__ inline PeerPointer<T> PeerBuffer(const CallParams& call, int rank,
                                            WorkspaceBufferId buffer) {
  return PeerPointer<T>(
      reinterpret_cast<T*>(call.control->peers[rank].workspace + call.buffer_offsets[buffer]));
}

template <typename Value>
__device__ inline void StoreToPeer(PeerPointer<Value> to, const Value& value) {
  *to.address_ = value;
}

// The packet is stored at once: who finds the tag finds the data.
template <typename Packet>
__device__ inline void StorePacket(PeerPointer<Packet> to, uint64_t data, uint64_t tag) {
  static_assert(sizeof(Packet) == 16);
  StoreRelaxedSystem(static_cast<void*>(to.address_), data, tag);  // SIGNAL_SEGMENT
}

// Called by one thread. The store belongs to the thread's next bulk group.
__device__ inline void BulkStoreToPeer(PeerPointer<uint4> to, uint32_t from, uint32_t bytes) {
  BulkStore(to.address_, from, bytes);
}

// Release: after what this thread has stored, and what it has seen others store.
__device__ inline void SignalSegment(PeerPointer<uint64_t> flag, uint64_t tag) {
  StoreReleaseSystem(flag.address_, tag);  // SIGNAL_SEGMENT
}

__device__ inline void StoreEntry(const ControlBlock* control, int peer, uint64_t sequence,
                                  uint64_t fingerprint, bool poisoned) {
  EntryFlags* const flags = &control->peers[peer].inbox->entry[sequence % 2][control->rank];
  StoreRelaxedSystem(&flags->fingerprint, fingerprint);
  StoreRelaxedSystem(&flags->poisoned, poisoned ? 1 : 0);
  // Release: after the other entry flags, and after everything that this rank's last call did.
  // SIGNAL_ENTRY
  StoreReleaseSystem(&flags->sequence, sequence);
}

// Release: after what this thread has stored, and what it has acquired by counting.
__device__ inline void StoreChunkFlag(const ControlBlock* control, int peer, WaitPoint wait_point,
                                      int chunk, uint64_t sequence) {
  ChunkFlags& flags = ChunkFlagsAt(control->peers[peer].inbox, wait_point);
  StoreReleaseSystem(&flags[control->rank][chunk], sequence);
}

// Release, as StoreChunkFlag. Flags inside the domain: a chunk of `ring` has arrived in a slot, or
// its credit is returned.
enum class DomainFlag { kChunk, kCredit };
__device__ inline void StoreDomainFlag(const ControlBlock* control, int peer, DomainFlag flag,
                                       int ring, int slot, uint64_t number) {
  Inbox* const inbox = control->peers[peer].inbox;
  DomainFlags& flags = flag == DomainFlag::kChunk ? inbox->domain_chunks : inbox->domain_credits;
  StoreReleaseSystem(&flags[ring][slot], number);
}

// Release, likewise. Flags between rail partners, whose memory this rank reaches: a message has
// arrived in a slot, or its credit is returned.
enum class RailFlag { kMessage, kCredit };
__device__ inline void StoreRailFlag(const ControlBlock* control, int partner, RailFlag flag,
                                     int slot, uint64_t number) {
  Inbox* const inbox = control->peers[partner].inbox;
  uint64_t* const flags = flag == RailFlag::kMessage ? inbox->rail_messages : inbox->rail_credits;
  StoreReleaseSystem(&flags[slot], number);
}

// The word publishes no other data, so its order does not matter. It may replace another cause.
__device__ inline void StoreAbort(const ControlBlock* control, int peer, uint32_t word) {
  StoreReleaseSystem(&control->peers[peer].inbox->abort, word);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_PEER_STORES_CUH_
