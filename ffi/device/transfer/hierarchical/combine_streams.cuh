// The streams of a combine over several NVLink domains.
//
//   metadata   one message to each rail partner: this domain has entered the call, and whether a
//              plan there is poisoned. Its partners' are read, too
//   push       this rank's partial sums of a chunk of a rank's tokens go to the rank of this domain
//              that has the index of the tokens' rank
//   send       that rank adds the partial sums of its domain, in rank order, and sends one row per
//              token home
//   reduce     the tokens' rank adds the sums of the domains in order, its own included
//
// With domains of one rank a partial sum is its domain's sum: push packs it, or stores this rank's
// own among the results, where reduce finds it, and nothing is left to send.
//
// Some blocks push, and all blocks run the other streams. If all of them pushed, their chunks would
// share the links, and arrive at the end, all together.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_COMBINE_STREAMS_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_COMBINE_STREAMS_CUH_

#include "ffi/device/transfer/combine/partial_sums.cuh"
#include "ffi/device/transfer/hierarchical/combine_params.h"
#include "ffi/device/transfer/hierarchical/domain.cuh"
#include "ffi/device/transfer/hierarchical/forwarding.cuh"
#include "ffi/device/transfer/hierarchical/rail.cuh"
#include "ffi/device/transfer/hierarchical/streams.cuh"

namespace jax_ep {

// `Sum` is called as sum(terms, first, end, to), see SumRows.
template <typename Sum>
class CombineStreams {
 public:
  // A rank with a poisoned plan takes part with no rows.
  __device__ CombineStreams(const HierarchicalCombineParams& params, const RoleContext& role,
                            uint64_t sequence, bool pushes, bool poisoned, bool is_poisoned_here,
                            Sum sum)
      : params_(params),
        call_(params.combine.call),
        layout_(params.layout),
        domains_(params.layout.domains),
        role_(role),
        sequence_(sequence),
        rank_(call_.control->rank),
        here_(domains_.Domain(rank_)),
        rails_(domains_.num_rails()),
        end_(poisoned ? 0 : EndOfRows(call_, params.combine.plan)),
        pushes_(pushes),
        poisoned_(poisoned),
        poisoned_here_(is_poisoned_here),
        sum_(sum) {}

  // Whether a message has said that a plan is poisoned.
  __device__ bool has_found_poison() const { return has_found_poison_; }

  // Streams that empty slots come first.
  __device__ int count() const { return NumOthers() + (pushes_ ? NumPushes() : 0); }
  // Blocks that push look for that first, so that the links have work at once.
  __device__ int First(int block) const {
    return pushes_ ? NumOthers() + block % NumPushes() : block % NumOthers();
  }
  __device__ int NumItems(int stream) const {
    const Kind kind = KindOf(&stream);
    return kind == kTell || kind == kHear ? 1 : layout_.num_chunks;
  }

  __device__ bool IsReady(int stream, int chunk) const {
    switch (KindOf(&stream)) {
      case kTell:
        return RailOf(stream).MayPack(0);
      case kHear:
        return RailOf(stream).HasArrived(0);
      case kReduce:
        return MissingMessage(chunk) < 0 && HasOwnSums(chunk) && MissingPush(here_, chunk) < 0;
      case kSend: {
        const Rail rail = RailOf(stream);
        return rail.MayPack(Message(chunk)) && MissingPush(rail.domain(), chunk) < 0;
      }
      default: {
        const int source = Source(stream);
        if (HasRings()) return HasCredit(call_, RingOf(source), Slot(chunk));
        return source == rank_ || RailTo(source).MayPack(Message(chunk));
      }
    }
  }
  __device__ int Peer(int stream, int chunk) const {
    const Kind kind = KindOf(&stream);
    if (kind == kPush) return Holder(Source(stream));
    const int missing = kind == kReduce ? MissingPush(here_, chunk)
                        : kind == kSend ? MissingPush(RailOf(stream).domain(), chunk)
                                        : -1;
    if (missing >= 0) return missing;
    if (kind != kReduce) return RailOf(stream).partner();
    const int rail = MissingMessage(chunk);
    return rail < 0 ? rank_ : RailOf(rail).partner();
  }
  __device__ bool HasEntered() const {
    bool has_all = true;
#pragma unroll 1
    for (int rail = LaneIndex(); rail < rails_; rail += 32) has_all &= RailOf(rail).HasArrived(0);
    return !__any_sync(kFullWarp, !has_all);
  }

  __device__ void Run(int stream, int chunk) {
    last_stream_ = stream;
    last_chunk_ = chunk;
    switch (KindOf(&stream)) {
      case kTell:
        return Tell(RailOf(stream));
      case kHear:
        return Hear(RailOf(stream));
      case kReduce:
        return Reduce(chunk);
      case kSend:
        return Send(RailOf(stream), chunk);
      default:
        return Push(Source(stream), chunk);
    }
  }

  // Ends the last item, whose stores are in flight: signals.
  __device__ void Complete() {
    int stream = last_stream_;
    const int chunk = last_chunk_;
    if (stream < 0) return;
    last_stream_ = -1;
    const Kind kind = KindOf(&stream);
    if (kind == kTell || kind == kHear) return;
    role_.Sync();
    if (role_.Warp() != 0) return;
    const DomainSlot slot = Slot(chunk);
    InjectDelayOfItem(call_, sequence_, 4, chunk);
    if (kind == kReduce) {
#pragma unroll 1
      for (int rail = LaneIndex(); rail < rails_; rail += 32) {
        RailOf(rail).ReturnCredit(Message(chunk));
      }
      if (HasRings()) ReturnCredits(here_, slot);
    } else if (kind == kSend) {
      const Rail rail = RailOf(stream);
      if (LaneIndex() == 0) rail.Put(Message(chunk));
      ReturnCredits(rail.domain(), slot);
    } else if (LaneIndex() == 0) {
      const int source = Source(stream);
      if (HasRings()) {
        // SIGNAL_CHUNK
        const int ring = domains_.Rank(domains_.Domain(source), domains_.Index(rank_));
        StoreDomainFlag(call_.control, Holder(source), DomainFlag::kChunk, ring, slot.slot,
                        slot.number);
      } else if (IsPacked(source)) {
        RailTo(source).Put(Message(chunk));
      } else {
        AddReleaseDevice(OwnSums(chunk), uint64_t{1} << chunk % 64);
      }
    }
  }

 private:
  enum Kind { kTell, kHear, kReduce, kSend, kPush };

  // Whether partial sums go through rings of ranks of this domain, this one included.
  __device__ bool HasRings() const { return domains_.size > 1; }
  __device__ int NumSends() const { return HasRings() ? rails_ : 0; }
  __device__ int NumPushes() const { return HasRings() ? call_.num_ranks : rails_; }
  // The streams of all blocks. Without rings the last of them makes own sums.
  __device__ int NumOthers() const { return 2 * rails_ + 1 + NumSends() + (HasRings() ? 0 : 1); }
  // Returns what a stream is of, and makes it an index among these.
  __device__ Kind KindOf(int* stream) const {
    if (*stream < rails_) return kTell;
    *stream -= rails_;
    if (*stream < rails_) return kHear;
    *stream -= rails_;
    if (*stream == 0) return kReduce;
    *stream -= 1;
    if (*stream < NumSends()) return kSend;
    *stream -= NumSends();
    return kPush;
  }
  __device__ Rail RailOf(int rail) const { return {call_, layout_, rail}; }
  __device__ Rail RailTo(int source) const {
    return RailOf(domains_.Rail(here_, domains_.Domain(source)));
  }
  __device__ static int Message(int chunk) { return 1 + chunk; }

  // The tokens' ranks: each rank begins with the next one. Without rings its own are the first.
  __device__ int Source(int stream) const {
    return call_.RankAfter(rank_, HasRings() ? stream + 1 : stream);
  }
  // Returns the rank of this domain that adds partial sums of a source's tokens.
  __device__ int Holder(int source) const { return domains_.Rank(here_, domains_.Index(source)); }
  // Whether partial sums of a source's tokens go into a message right away.
  __device__ bool IsPacked(int source) const { return !HasRings() && source != rank_; }

  // Partial sums are in rings by the tokens' domain. Flags are by this domain and the rank that
  // stores, and credits by the one that holds the ring.
  __device__ int RingOf(int source) const { return source; }
  __device__ DomainSlot Slot(int chunk) const { return {layout_, sequence_, chunk}; }
  __device__ int64_t SlotTokens(int domain, int chunk) const {
    return (int64_t{domain} * layout_.domain_slots + Slot(chunk).slot) * layout_.chunk_tokens;
  }

  // Returns a rank of this domain that has not pushed its sums of a chunk of `domain`, or -1.
  __device__ int MissingPush(int domain, int chunk) const {
    const DomainSlot slot = Slot(chunk);
#pragma unroll 1
    for (int i = 0; HasRings() && i < domains_.size; ++i) {
      if (!HasChunk(call_, domains_.Rank(domain, i), slot)) return domains_.Rank(here_, i);
    }
    return -1;
  }
  // The chunks of this rank's tokens whose own sums are among the results, one per bit.
  __device__ uint64_t* OwnSums(int chunk) const {
    return &call_.control->hierarchical.own_sums[chunk / 64];
  }
  // Acquire. NETWORK_WAIT_LOCAL
  __device__ bool HasOwnSums(int chunk) const {
    return HasRings() || (LoadAcquireDevice(OwnSums(chunk)) >> chunk % 64 & 1) != 0;
  }

  // Returns a rail whose message of a chunk has not arrived, or -1.
  __device__ int MissingMessage(int chunk) const {
#pragma unroll 1
    for (int rail = 0; rail < rails_; ++rail) {
      if (!RailOf(rail).HasArrived(Message(chunk))) return rail;
    }
    return -1;
  }

  __device__ void Tell(const Rail& rail) const {
    if (role_.Thread() != 0) return;
    PackHeader(call_, rail, 0, 0, poisoned_here_);
    rail.Put(0);
  }
  __device__ void Hear(const Rail& rail) {
    const MessageHeader& header = rail.Header(0);
    if (role_.Warp() == 0 && LoadRelaxedSystem(&header.fingerprint) != call_.fingerprint) {
      AbortGroup(call_, Outcome::kMismatch, WaitPoint::kEntry, rail.partner(), sequence_);
    }
    has_found_poison_ |= LoadRelaxedSystem(&header.poisoned) != 0;
    role_.Sync();
    if (role_.Thread() == 0) rail.ReturnCredit(0);
  }

  // The ranks of this domain that have a partial sum of a token of a rail's domain, or of this one.
  __device__ int NumPartialSums(int domain, int token) const {
    const int words = TokenRankWords(domains_);
    const uint32_t* const ranks =
        params_.forwarding.token_ranks + (int64_t{domain} * call_.num_tokens + token) * words;
    int count = 0;
    for (int word = 0; word < words && !poisoned_; ++word) count += __popc(ranks[word]);
    return min(count, call_.num_partial_sums);
  }
  // The tokens of a chunk of `domain` that have partial sums here, one per bit. Called by a warp.
  __device__ uint64_t TokensOf(int domain, int chunk) const {
    const int count = layout_.ChunkTokens(chunk, call_.num_tokens);
    uint64_t tokens = 0;
    for (int i = 0; i < 2; ++i) {
      const int index = LaneIndex() + 32 * i;
      const bool has_sums =
          index < count && NumPartialSums(domain, chunk * layout_.chunk_tokens + index) > 0;
      tokens |= uint64_t{__ballot_sync(kFullWarp, has_sums)} << (32 * i);
    }
    return tokens;
  }
  __device__ static int RowIn(uint64_t tokens, int index) {
    return __popcll(tokens & ((uint64_t{1} << index) - 1));
  }

  // A message has a scalar for each assignment of its tokens, if there are any, then rows.
  __device__ int64_t RowsOffset() const {
    const int64_t scalars = params_.combine.has_scalars
                                ? int64_t{layout_.chunk_tokens} * call_.top_k * sizeof(float)
                                : 0;
    return kHeaderBytes + CeilDivide(scalars, kHeaderBytes) * kHeaderBytes;
  }

  // Called by each warp of the role for its tokens of a chunk: use(index, token).
  template <typename Use>
  __device__ void ForEachToken(int chunk, Use use) const {
    const int count = layout_.ChunkTokens(chunk, call_.num_tokens);
#pragma unroll 1
    for (int index = role_.Warp(); index < count; index += role_.NumWarps()) {
      use(index, chunk * layout_.chunk_tokens + index);
    }
  }

  __device__ void Push(int source, int chunk) const {
    const CombineParams& combine = params_.combine;
    const int domain = domains_.Domain(source);
    const bool is_packed = IsPacked(source);
    const Rail rail = is_packed ? RailTo(source) : RailOf(0);
    const int holder = Holder(source);
    PeerPointer<uint4> rows;
    PeerPointer<float> scalars;
    uint64_t tokens = 0;
    if (is_packed) {
      tokens = TokensOf(domain, chunk);
      const PeerPointer<uint8_t> to = rail.Packed(Message(chunk));
      rows = (to + RowsOffset()).template As<uint4>();
      scalars = (to + kHeaderBytes).template As<float>();
      if (role_.Thread() == 0) PackHeader(call_, rail, Message(chunk), tokens, false);
    } else if (!HasRings()) {
      const int64_t first = int64_t{chunk} * layout_.chunk_tokens;
      rows = PeerPointer<uint4>(static_cast<uint4*>(combine.out)) + first * call_.result_vectors;
      scalars = PeerPointer<float>(combine.assignment_scalars) + first * call_.top_k;
    } else {
      const int64_t first = SlotTokens(domain, chunk);
      rows = PeerBuffer<uint4>(call_, holder, kReceivedRows) +
             first * call_.num_partial_sums * call_.wire_vectors;
      scalars = PeerBuffer<float>(call_, holder, kAssignmentScalars) + first * call_.top_k;
    }
    ForEachToken(chunk, [&](int index, int token) {
      const TokenRows found = FindRows(call_, combine.plan, end_, source, token);
      if (is_packed && !(tokens >> index & 1)) return;
      const int place = is_packed ? RowIn(tokens, index) : index;
      SendPartialSum(combine, found, {place, 0, call_.wire_vectors}, rows, scalars, sum_);
    });
  }

  // Returns the partial sums of a token in a slot, as terms in rank order.
  __device__ SumTerms<2> PartialSums(int64_t slot_token, int count) const {
    SumTerms<2> terms;
    terms.assignments = count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
    const uint4* const from = call_.LocalBuffer<const uint4>(kReceivedRows) +
                              slot_token * call_.num_partial_sums * call_.wire_vectors;
    for (int i = 0; i < 2; ++i) {
      const int index = LaneIndex() + 32 * i;
      terms.rows[i] = reinterpret_cast<uint64_t>(from + int64_t{index} * call_.wire_vectors);
      terms.weights[i] = 1;
    }
    return terms;
  }

  __device__ void Send(const Rail& rail, int chunk) const {
    const int domain = rail.domain();
    const uint64_t tokens = TokensOf(domain, chunk);
    const PeerPointer<uint8_t> to = rail.Packed(Message(chunk));
    const PeerPointer<uint4> rows = (to + RowsOffset()).template As<uint4>();
    const PeerPointer<float> scalars = (to + kHeaderBytes).template As<float>();
    if (role_.Thread() == 0) PackHeader(call_, rail, Message(chunk), tokens, false);
    ForEachToken(chunk, [&](int index, int token) {
      if (!(tokens >> index & 1)) return;
      const int64_t slot_token = SlotTokens(domain, chunk) + index;
      const int row = RowIn(tokens, index);
      const float* const from =
          call_.LocalBuffer<const float>(kAssignmentScalars) + slot_token * call_.top_k;
      for (int k = LaneIndex(); params_.combine.has_scalars && k < call_.top_k; k += 32) {
        StoreToPeer(scalars + (row * call_.top_k + k), LoadGlobalNoAllocate(&from[k]));
      }
      sum_(PartialSums(slot_token, NumPartialSums(domain, token)), 0, call_.wire_vectors,
           rows + int64_t{row} * call_.wire_vectors);
    });
  }

  // Called by one warp. Returns the credits of a chunk to all ranks of this domain.
  __device__ void ReturnCredits(int domain, const DomainSlot& slot) const {
    const int ring = domains_.Rank(domain, domains_.Index(rank_));
#pragma unroll 1
    for (int i = LaneIndex(); i < domains_.size; i += 32) {  // SIGNAL_CREDIT
      StoreDomainFlag(call_.control, domains_.Rank(here_, i), DomainFlag::kCredit, ring, slot.slot,
                      slot.number);
    }
  }

  __device__ void Reduce(int chunk) const {
    ForEachToken(chunk, [&](int index, int token) { ReduceToken(chunk, index, token); });
  }

  // Called by one warp. Makes the sum of this domain, which takes the place of a term that each
  // lane has read then, or of the result. Returns its address, null if there is none.
  __device__ const uint4* OwnSum(int64_t slot_token, int token, int num_sums) const {
    const CombineParams& combine = params_.combine;
    if (num_sums == 0) return nullptr;
    if (!HasRings()) {
      return static_cast<const uint4*>(combine.out) + int64_t{token} * call_.result_vectors;
    }
    const SumTerms<2> terms = PartialSums(slot_token, num_sums);
    auto* const first = reinterpret_cast<uint4*>(__shfl_sync(kFullWarp, terms.rows[0], 0));
    if (num_sums > 1) {
      sum_(terms, 0, call_.wire_vectors, PeerPointer<uint4>(first));
      FenceBlock();  // each lane reads again what it has stored
    }
    return first;
  }

  // Called by one warp.
  __device__ void ReduceToken(int chunk, int index, int token) const {
    const CombineParams& combine = params_.combine;
    const int64_t slot_token = SlotTokens(here_, chunk) + index;
    const int num_sums = NumPartialSums(here_, token);
    const uint4* const own = OwnSum(slot_token, token, num_sums);
    SumTerms<2> terms;
    terms.assignments = 0;
    for (int i = 0; i < 2; ++i) {
      const int domain = LaneIndex() + 32 * i;
      const uint4* const row = domain == here_ ? own : AddendOf(domain, chunk, index).row;
      terms.rows[i] = reinterpret_cast<uint64_t>(row);
      terms.weights[i] = 1;
      terms.assignments |= uint64_t{__ballot_sync(kFullWarp, row != nullptr)} << (32 * i);
    }
    uint4* const to = static_cast<uint4*>(combine.out) + int64_t{token} * call_.result_vectors;
    sum_(terms, 0, call_.wire_vectors, PeerPointer<uint4>(to));
    if (!combine.has_scalars) return;
#pragma unroll 1
    for (int k = LaneIndex(); k < call_.top_k; k += 32) {
      const int assignment = token * call_.top_k + k;
      const int32_t destination = combine.plan.destination[assignment];
      const bool is_kept = 0 <= destination && destination < call_.num_ranks;
      const int domain = is_kept ? domains_.Domain(destination) : -1;
      const float* scalars = nullptr;
      if (domain == here_) {
        if (!HasRings()) continue;  // Push has stored it
        scalars = call_.LocalBuffer<const float>(kAssignmentScalars) + slot_token * call_.top_k;
      } else if (is_kept) {
        scalars = AddendOf(domain, chunk, index).scalars;
      }
      const float scalar = scalars == nullptr ? 0 : LoadGlobalNoAllocate(&scalars[k]);
      combine.assignment_scalars[assignment] = scalar;
    }
  }

  // Another domain's sum of a token, and its scalars; null if it has none.
  struct Addend {
    const uint4* row = nullptr;
    const float* scalars = nullptr;
  };
  __device__ Addend AddendOf(int domain, int chunk, int index) const {
    if (domain >= domains_.count) return {};
    const Rail rail = RailOf(domains_.Rail(here_, domain));
    const uint64_t tokens = LoadRelaxedSystem(&rail.Header(Message(chunk)).tokens);
    if (!(tokens >> index & 1)) return {};
    const int row = RowIn(tokens, index);
    const uint8_t* const from = rail.Received(Message(chunk));
    return {reinterpret_cast<const uint4*>(from + RowsOffset()) + int64_t{row} * call_.wire_vectors,
            reinterpret_cast<const float*>(from + kHeaderBytes) + row * call_.top_k};
  }

  const HierarchicalCombineParams& params_;
  const CallParams& call_;
  const HierarchicalLayout& layout_;
  const Domains& domains_;
  const RoleContext& role_;
  const uint64_t sequence_;
  const int rank_;
  const int here_;  // this rank's domain
  const int rails_;
  const int32_t end_;
  const bool pushes_;
  const bool poisoned_;       // this rank's plan
  const bool poisoned_here_;  // a plan in this domain
  const Sum sum_;
  bool has_found_poison_ = false;
  int last_stream_ = -1;  // the item that is not complete yet
  int last_chunk_ = 0;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_COMBINE_STREAMS_CUH_
