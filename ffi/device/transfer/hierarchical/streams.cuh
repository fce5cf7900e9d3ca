// Streams of work items. The items of one stream follow each other, such as the chunks of one rail,
// and an item is taken only when it can run without a wait: its data have arrived, and the slots
// that it fills are free. So a full destination, or a late source, holds up nobody but itself, and
// any number of blocks makes progress, whatever they run.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_STREAMS_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_STREAMS_CUH_

#include "ffi/device/protocol/wait.cuh"

namespace jax_ep {

inline constexpr int kNoneLeft = -1;
inline constexpr int kNoneReady = -2;
struct StreamItem {
  int32_t stream;  // kNoneLeft, kNoneReady
  int32_t index;   // in the stream
  Outcome outcome;
  bool is_ready;  // otherwise the item is claimed, and waits
};

// The claims of a stream's items: those of a window of 32 items, one per bit, and its first item in
// the high bits. A claim is one atomic operation, even if others claim at the same time: with a
// counter of items, which only one of them advances, blocks would take turns of a microsecond.
class StreamClaims {
 public:
  // Called by one warp; all lanes find the same.
  __device__ StreamClaims(uint64_t* words, int stream)
      : word_(&words[stream]), seen_(__shfl_sync(0xffffffffu, LoadAcquireDevice(word_), 0)) {}

  // The claims as they were found.
  __device__ uint64_t seen() const { return seen_; }
  __device__ int first() const { return static_cast<int>(seen_ >> 32); }
  __device__ bool IsFree(int bit) const { return (seen_ >> bit & 1) == 0; }

  // Called by one thread. Claims item first() + bit of `num_items`, and returns it, or -1 if
  // another block was faster. It may also be a later one, if the window has moved on meanwhile.
  __device__ int Claim(int bit, int num_items) const {
    const uint64_t before = OrRelaxedDevice(word_, uint64_t{1} << bit, true);
    if (before >> bit & 1) return -1;
    const int first = static_cast<int>(before >> 32);
    const int left = num_items - first;
    const uint32_t all = left >= 32 ? 0xffffffffu : (1u << max(left, 0)) - 1;
    const auto claimed = static_cast<uint32_t>(before | uint64_t{1} << bit);
    if (left > 0 && (claimed & all) == all) {
      StoreReleaseDevice(word_, static_cast<uint64_t>(first + 32) << 32);
    }
    return bit < left ? first + bit : -1;
  }

 private:
  uint64_t* const word_;
  const uint64_t seen_;
};

// Returns the index of the n-th bit that is set.
__device__ inline int NthBit(uint32_t bits, int n) {
  for (; n > 0; --n) bits &= bits - 1;
  return __ffs(bits) - 1;
}

// Called by one whole warp; all lanes return the same. Aborts if a rank has left the generation
// instead of entering the call (start_generation.cu). It has told all ranks by entry flags, which
// otherwise only those of its domain wait for.
__device__ inline Outcome FindLeaver(const CallParams& call, uint64_t sequence) {
  const ControlBlock* const control = call.control;
  const EntryFlags* const entry = control->inbox->entry[sequence % 2];
  uint32_t leaver = kMaxRanks;
  ForEachPeer(control, [&](int peer) {
    if (LoadAcquireSystem(&entry[peer].sequence) < sequence) return;
    if (ReadEntryFlags(call, entry[peer]) == Outcome::kMismatch) {
      leaver = min(leaver, static_cast<uint32_t>(peer));
    }
  });
  leaver = __reduce_min_sync(kFullWarp, leaver);
  if (leaver == kMaxRanks) return Outcome::kArrived;
  AbortGroup(call, Outcome::kMismatch, WaitPoint::kEntry, static_cast<int>(leaver), sequence);
  return Outcome::kMismatch;
}

// Called by a role. Takes an item that is ready. If there is none, waits for one, or returns
// kNoneReady, or an item that is claimed only: another block was faster, and the claim got a later
// item. Give it back as `held`. The first warp polls one stream after another, lane i item i of the
// stream's window.
//
// `Streams` has count(), the number of streams; First(block), the one that a block polls first,
// another one for each block; NumItems(stream); IsReady(stream, item), an acquire
// of all that the item needs; Peer(stream, item), for which rank a wait for it waits; and
// HasEntered(), whether all ranks have entered the call, which the deadline depends on.
template <typename Streams>
__device__ inline StreamItem NextItem(const CallParams& call, const RoleContext& role,
                                      const Streams& streams, uint64_t* claims, uint64_t sequence,
                                      const StreamItem& held, bool waits, StreamItem* scratch) {
  role.Sync();  // the previous item has been read
  if (role.Warp() == 0) {
    Deadline entry(call, WaitPoint::kEntry, sequence);
    Deadline progress(call, WaitPoint::kChunk, sequence);
    const int count = streams.count();
    StreamItem item = {kNoneLeft, 0, Outcome::kArrived, true};
    int stream = count == 0 ? 0 : streams.First(role.block);
    int claimed = -1;  // an item of the stream that was claimed before it was found ready
    if (!held.is_ready) {
      stream = held.stream;
      claimed = held.index;
    }
    int num_polled = 0, num_left = 0;
    uint64_t sum = 0, last_sum = 0;
    uint32_t missing = kMaxRanks;
    while (count > 0) {
      const StreamClaims found(claims, stream);
      const int num_items = streams.NumItems(stream);
      const bool is_left = claimed >= 0 || found.first() < num_items;
      const int index = claimed >= 0 ? claimed : found.first() + LaneIndex();
      const bool is_free = claimed >= 0 || (found.IsFree(LaneIndex()) && index < num_items);
      const bool is_ready = is_free && streams.IsReady(stream, index);
      // The abort word overrides the flags, so it is loaded after them. It is forwarded before
      // anyone on this rank can see it, as in WaitForFlags. NETWORK_PUT_ABORT
      const uint32_t aborted =
          __shfl_sync(kFullWarp, LoadRelaxedSystem(&call.control->inbox->abort), 0);
      if (aborted != 0) {
        ForwardAbort(call, aborted);
        item.outcome = static_cast<Outcome>(aborted);
        break;
      }
      const uint32_t ready = __ballot_sync(kFullWarp, is_ready);
      if (ready != 0 && claimed < 0) {
        // Blocks take different items, so that they do not get in each other's way.
        const int bit = NthBit(ready, role.block % __popc(ready));
        int taken = -1;
        if (LaneIndex() == bit) taken = found.Claim(bit, num_items);
        taken = __shfl_sync(kFullWarp, taken, bit);
        if (taken == found.first() + bit) {
          item.stream = stream;
          item.index = taken;
          break;
        }
        claimed = taken;
        continue;
      }
      if (ready != 0) {
        item.stream = stream;
        item.index = claimed;
        break;
      }
      if (is_left) {
        ++num_left;
        const int peer = is_free ? streams.Peer(stream, index) : kMaxRanks;
        missing = min(missing, static_cast<uint32_t>(peer));
      }
      sum += found.seen();
      if (claimed < 0) stream = stream + 1 == count ? 0 : stream + 1;
      if (++num_polled < count && claimed < 0) continue;
      if (num_left == 0) break;  // all items have been claimed
      if (!waits) {
        if (claimed < 0) {
          item.stream = kNoneReady;
        } else {
          item = {stream, claimed, Outcome::kArrived, false};
        }
        break;
      }
      // Items that other blocks take are progress, too.
      if (sum != last_sum) {
        entry.Restart();
        progress.Restart();
      }
      last_sum = sum;
      missing = min(__reduce_min_sync(kFullWarp, missing), static_cast<uint32_t>(kMaxRanks - 1));
      const bool has_entered = streams.HasEntered();
      item.outcome = (has_entered ? progress : entry).Check(missing);
      if (item.outcome == Outcome::kArrived && !has_entered)
        item.outcome = FindLeaver(call, sequence);
      if (item.outcome != Outcome::kArrived) break;
      num_polled = num_left = 0;
      sum = 0;
      missing = kMaxRanks;
      __nanosleep(100);
    }
    if (item.outcome != Outcome::kArrived && LaneIndex() == 0) RecordFailure(call, item.outcome);
    __syncwarp();  // orders what the lanes have acquired before what the first one stores
    if (LaneIndex() == 0) *scratch = item;
  }
  // Orders what the first warp has acquired before what the role does next.
  role.Sync();
  return *scratch;
}

// Called by a role. Runs items by streams.Run(item) until there are none left, or a wait fails. An
// item may leave its end, a wait for stores and a signal, to streams.Complete(), which is called
// before the next item, and before a wait: meanwhile the next item is found.
template <typename Streams>
__device__ inline Outcome RunStreams(const CallParams& call, const RoleContext& role,
                                     Streams& streams, uint64_t* claims, uint64_t sequence,
                                     StreamItem* scratch) {
  if (role.Warp() == 0) InjectDelay(call, sequence, 1);
  StreamItem item = {kNoneReady, 0, Outcome::kArrived, true};
  bool waits = true;
  while (true) {
    item = NextItem(call, role, streams, claims, sequence, item, waits, scratch);
    streams.Complete();
    if (item.outcome != Outcome::kArrived || item.stream == kNoneLeft) return item.outcome;
    waits = item.stream == kNoneReady || !item.is_ready;
    if (!waits) streams.Run(item.stream, item.index);
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_STREAMS_CUH_
