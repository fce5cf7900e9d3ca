// Streams of work items. The items of one stream follow each other, such as the chunks of one rail,
// and an item is taken only when it can run without a wait: its data have arrived, and the slots
// that it fills are free. So a full destination, or a late source, holds up nobody but itself, and
// any number of blocks makes progress, whatever they run.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_STREAMS_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_STREAMS_CUH_

#include "ffi/device/profile/recorder.cuh"
#include "ffi/device/transfer/hierarchical/domain.cuh"

namespace jax_ep {

inline constexpr int kNoneLeft = -1;
inline constexpr int kNoneReady = -2;
struct StreamItem {
  int32_t stream;  // kNoneLeft, kNoneReady
  int32_t index;   // in the stream
  Outcome outcome;
};

// The claims of items: one bit for each item of each stream, in words of a stream, and the first
// word of a stream that may have free items. A claim is one atomic operation, even if others claim
// at the same time: with a counter of items, which only one of them advances, blocks would take
// turns of a microsecond. An item that was found ready stays so until it is claimed.
class StreamClaims {
 public:
  static constexpr int kItemsPerWord = 64;

  __device__ StreamClaims(ClaimWords* claims, int stream, int words_per_stream, int num_items)
      : first_word_(&claims->first_words[stream]),
        word_(static_cast<int>(LoadAcquireDevice(first_word_))) {
    if (word_ * kItemsPerWord >= num_items) return;
    bits_ = &claims->bits[stream * words_per_stream + word_];
    seen_ = LoadAcquireDevice(bits_);
    const int left = num_items - word_ * kItemsPerWord;
    if (left < kItemsPerWord) seen_ |= ~uint64_t{0} << left;  // there are no such items
    is_left_ = true;
  }

  __device__ bool is_left() const { return is_left_; }
  __device__ uint64_t seen() const { return seen_ + static_cast<uint32_t>(word_); }

  // Returns a free item, of the first ones of the word, or -1.
  __device__ int FreeItem(int index) const {
    if (!is_left_ || seen_ == ~uint64_t{0}) return -1;
    const int bit = __ffsll(~seen_) - 1 + index;
    const bool is_free = bit < kItemsPerWord && (seen_ >> bit & 1) == 0;
    return is_free ? word_ * kItemsPerWord + bit : -1;
  }

  // For a free item that is ready. Returns whether it has claimed it.
  __device__ static bool Claim(ClaimWords* claims, int stream, int words_per_stream, int item) {
    uint64_t* const bits = &claims->bits[stream * words_per_stream + item / kItemsPerWord];
    const uint64_t bit = uint64_t{1} << item % kItemsPerWord;
    return (OrRelaxedDevice(bits, bit, true) & bit) == 0;
  }

  // Goes on to the next word, if this one has no free items.
  __device__ void Advance() const {
    if (is_left_ && seen_ == ~uint64_t{0}) {
      atomicCAS(first_word_, static_cast<uint32_t>(word_), static_cast<uint32_t>(word_) + 1);
    }
  }

 private:
  uint32_t* const first_word_;
  const int word_;
  uint64_t* bits_ = nullptr;
  uint64_t seen_ = 0;
  bool is_left_ = false;
};

// Returns the index of the n-th bit that is set.
__device__ inline int NthBit(uint32_t bits, int n) {
  for (; n > 0; --n) bits &= bits - 1;
  return __ffs(bits) - 1;
}

// Called by one whole warp; all lanes return the same. Takes an item that is ready. If there is
// none, waits for one, or returns kNoneReady. Polls 32 free items of a block's first stream, then
// some of each other one, as many streams at a time as it has lanes. One after another, each would
// take several loads that wait for each other.
//
// `Streams` has count(), the number of streams; First(block), the one that a block polls first,
// another one for each block; NumItems(stream); IsReady(stream, item), an acquire of all that the
// item needs; Peer(stream, item), for which rank a wait for it waits; and HasEntered(), whether all
// ranks have entered the call, which the deadline depends on. Lanes call the first four with
// different streams.
template <typename Streams>
__device__ inline StreamItem TakeItem(const CallParams& call, int block, const Streams& streams,
                                      ClaimWords* claims, uint64_t sequence, bool waits) {
  Deadline entry(call, WaitPoint::kEntry, sequence);
  Deadline progress(call, WaitPoint::kChunk, sequence);
  const int count = streams.count();
  StreamItem item = {kNoneLeft, 0, Outcome::kArrived};
  int first = count == 0 ? 0 : streams.First(block);
  // The last stream is one of the longest.
  const int words = count == 0 ? 0 : ClaimWords::words_per_stream(streams.NumItems(count - 1));
  // The lanes of a stream, for all but the first one of a round.
  const int others = Max(count - 1, 1);
  const int lanes_of_others = others < 32 ? 1 << (31 - __clz(32 / others)) : 1;
  uint32_t round = 1;
  int num_polled = 0;  // streams of this round
  bool is_left = false;
  uint64_t sum = 0, last_sum = 0;  // over the claims that the lane has seen
  uint32_t missing = kMaxRanks;
  while (count > 0) {
    const int lanes = num_polled == 0 ? 32 : lanes_of_others;
    const int polled = num_polled + LaneIndex() / lanes;
    const int stream = first + polled < count ? first + polled : first + polled - count;
    int free = -1;
    bool is_ready = false;
    if (polled < count) {
      const StreamClaims found(claims, stream, words, streams.NumItems(stream));
      free = found.FreeItem(LaneIndex() % lanes);
      is_ready = free >= 0 && streams.IsReady(stream, free);
      if (LaneIndex() % lanes == 0) found.Advance();
      is_left |= found.is_left();
      sum += found.seen();
    }
    // The abort word overrides the flags, so it is loaded after them. NETWORK_PUT_ABORT
    item.outcome = FindAbort(call);
    if (item.outcome != Outcome::kArrived) break;
    uint32_t ready = __ballot_sync(kFullWarp, is_ready);
    if (ready != 0) {
      // Takes one of the first such stream. Blocks take different ones, so that they do not get
      // in each other's way.
      const int of_stream = (__ffs(ready) - 1) / lanes * lanes;
      ready &= (lanes == 32 ? ~0u : (1u << lanes) - 1) << of_stream;
      const int lane = NthBit(ready, block % __popc(ready));
      item.stream = __shfl_sync(kFullWarp, stream, lane);
      item.index = __shfl_sync(kFullWarp, free, lane);
      const bool is_mine = LaneIndex() == lane && StreamClaims::Claim(claims, stream, words, free);
      if (__any_sync(kFullWarp, is_mine)) break;
      // Another block was faster. A new round begins with this stream.
      first = item.stream;
      item.stream = kNoneLeft;
      num_polled = 0;
      is_left = false;
      sum = last_sum = 0;
      missing = kMaxRanks;
      continue;
    }
    const bool is_checked = round % kPollsPerCheck == 0;
    if (is_checked && free >= 0) {
      missing = min(missing, static_cast<uint32_t>(streams.Peer(stream, free)));
    }
    num_polled += 32 / lanes;
    if (num_polled < count) continue;
    if (!__any_sync(kFullWarp, is_left)) break;  // all items have been claimed
    if (!waits) {
      item.stream = kNoneReady;
      break;
    }
    if (is_checked) {
      // Items that other blocks take are progress, too.
      if (__any_sync(kFullWarp, sum != last_sum)) {
        entry.Restart();
        progress.Restart();
      }
      last_sum = sum;
      missing = min(__reduce_min_sync(kFullWarp, missing), static_cast<uint32_t>(kMaxRanks - 1));
      const bool has_entered = streams.HasEntered();
      if (!has_entered) progress.Restart();
      item.outcome = (has_entered ? progress : entry).Check(missing);
      if (item.outcome == Outcome::kArrived && !has_entered) {
        item.outcome = FindLeaver(call, sequence);
      }
      if (item.outcome != Outcome::kArrived) break;
    }
    ++round;
    num_polled = 0;
    is_left = false;
    sum = 0;
    missing = kMaxRanks;
    __nanosleep(100);
  }
  if (item.outcome != Outcome::kArrived && LaneIndex() == 0) RecordFailure(call, item.outcome);
  __syncwarp();  // orders what the lanes have acquired before what any of them does next
  return item;
}

// TakeItem for a role.
template <typename Streams>
__device__ inline StreamItem NextItem(const CallParams& call, const RoleContext& role,
                                      const Streams& streams, ClaimWords* claims, uint64_t sequence,
                                      bool waits, StreamItem* scratch) {
  const ProfileSpan span(SpanKind::kWaitItem);
  role.Sync();  // the previous item has been read
  if (role.Warp() == 0) {
    const StreamItem item = TakeItem(call, role.block, streams, claims, sequence, waits);
    if (LaneIndex() == 0) *scratch = item;
  }
  // Orders what the first warp has acquired before what the role does next.
  role.Sync();
  return *scratch;
}

// Called by a role. Runs items by streams.Run(stream, item) until there are none left, or a wait
// fails. An item may leave its end, a wait for stores and a signal, to streams.Complete(stream,
// item), which is called before the next item, and before a wait: meanwhile the next item is found.
template <typename Streams>
__device__ inline Outcome RunStreams(const CallParams& call, const RoleContext& role,
                                     Streams& streams, ClaimWords* claims, uint64_t sequence,
                                     StreamItem* scratch) {
  if (role.Warp() == 0) InjectDelay(call, sequence, 1);
  StreamItem last = {kNoneReady, 0, Outcome::kArrived};
  while (true) {
    const bool waits = last.stream == kNoneReady;
    const StreamItem item = NextItem(call, role, streams, claims, sequence, waits, scratch);
    if (last.stream >= 0) {
      const ProfileSpan span(SpanKind::kWaitItemStores);
      streams.Complete(last.stream, last.index);
    }
    if (item.outcome != Outcome::kArrived || item.stream == kNoneLeft) return item.outcome;
    if (item.stream >= 0) {
      const ProfileSpan span(streams.SpanOf(item.stream));
      streams.Run(item.stream, item.index);
    }
    last = item;
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_STREAMS_CUH_
