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
// With domains of one rank nothing is left to send (combine_chunks.cuh).
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_COMBINE_STREAMS_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_COMBINE_STREAMS_CUH_

#include "ffi/device/transfer/hierarchical/combine_chunks.cuh"
#include "ffi/device/transfer/hierarchical/streams.cuh"

namespace jax_ep {

template <typename Sum>
class CombineStreams {
 public:
  // A plan of this domain may be poisoned.
  __device__ CombineStreams(const HierarchicalCombineParams& params,
                            const CombineChunks<Sum>& chunks, uint64_t sequence,
                            bool is_poisoned_here)
      : call_(params.combine.call),
        layout_(params.layout),
        domains_(params.layout.domains),
        chunks_(chunks),
        sequence_(sequence),
        rank_(call_.control->rank),
        here_(domains_.Domain(rank_)),
        rails_(domains_.num_rails()),
        is_poisoned_here_(is_poisoned_here) {}

  // Returns what messages have told this warp: kPoisoned if a plan is, kMismatch if a partner runs
  // another call.
  __device__ Outcome outcome() const { return outcome_; }

  // Streams that empty slots come first.
  __device__ int count() const { return NumOthers() + NumPushes(); }
  // Half of the blocks look for pushes first, so that the links have work at once.
  __device__ int First(int block) const {
    const int index = block / 2;
    return block % 2 == 0 ? NumOthers() + index % NumPushes() : index % NumOthers();
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
        return rail.MayPack(MessageOf(chunk)) && MissingPush(rail.domain(), chunk) < 0;
      }
      default: {
        const int source = Source(stream);
        if (HasRings()) return HasCredit(call_, source, chunks_.Slot(chunk));
        return !chunks_.IsPacked(source) || chunks_.RailTo(source).MayPack(MessageOf(chunk));
      }
    }
  }
  __device__ int Peer(int stream, int chunk) const {
    const Kind kind = KindOf(&stream);
    if (kind == kPush) return chunks_.Holder(Source(stream));
    const int missing = kind == kReduce ? MissingPush(here_, chunk)
                        : kind == kSend ? MissingPush(RailOf(stream).domain(), chunk)
                                        : -1;
    if (missing >= 0) return missing;
    if (kind != kReduce) return RailOf(stream).partner();
    const int rail = MissingMessage(chunk);
    return rail < 0 ? rank_ : RailOf(rail).partner();
  }
  __device__ bool HasEntered() const {
    return AllRails(layout_, [&](int rail) { return RailOf(rail).HasArrived(0); });
  }

  // A unit is a token of a chunk.
  __device__ int NumUnits(int stream, int chunk) const {
    const Kind kind = KindOf(&stream);
    return kind == kTell || kind == kHear ? 1 : layout_.ChunkTokens(chunk, call_.num_tokens);
  }
  // The functions below are called by one warp.
  __device__ void RunUnit(int stream, int chunk, int unit) {
    switch (KindOf(&stream)) {
      case kTell:
        return Tell(RailOf(stream));
      case kHear:
        return Hear(RailOf(stream));
      case kReduce:
        return chunks_.Reduce(chunk, unit);
      case kSend:
        return chunks_.Send(RailOf(stream), chunk, unit);
      default:
        return chunks_.Push(Source(stream), chunk, unit);
    }
  }

  __device__ SpanKind SpanOf(int stream) const {
    switch (KindOf(&stream)) {
      case kTell:
      case kHear:
        return SpanKind::kSendRoutes;
      case kReduce:
        return SpanKind::kReduce;
      case kSend:
        return SpanKind::kPackMessage;
      default:
        return SpanKind::kSendSums;
    }
  }

  // Signals.
  __device__ void Complete(int stream, int chunk) const {
    const Kind kind = KindOf(&stream);
    if (kind == kTell || kind == kHear) return;
    const DomainSlot slot = chunks_.Slot(chunk);
    InjectDelayOfItem(call_, sequence_, 4, chunk);
    if (kind == kReduce) {
#pragma unroll 1
      for (int rail = LaneIndex(); rail < rails_; rail += 32) {
        RailOf(rail).ReturnCredit(MessageOf(chunk));
      }
      if (HasRings()) ReturnCredits(here_, slot);
    } else if (kind == kSend) {
      const Rail rail = RailOf(stream);
      if (LaneIndex() == 0) rail.Put(MessageOf(chunk));
      ReturnCredits(rail.domain(), slot);
    } else if (LaneIndex() == 0) {
      const int source = Source(stream);
      if (HasRings()) {
        // SIGNAL_CHUNK
        StoreDomainFlag(call_.control, chunks_.Holder(source), DomainFlag::kChunk,
                        domains_.Partner(rank_, source), slot.slot, slot.number);
      } else if (chunks_.IsPacked(source)) {
        chunks_.RailTo(source).Put(MessageOf(chunk));
      } else {
        AddReleaseDevice(OwnSums(chunk), uint64_t{1} << chunk % 64);
      }
    }
  }

 private:
  enum Kind { kTell, kHear, kReduce, kSend, kPush };

  __device__ bool HasRings() const { return chunks_.HasRings(); }
  __device__ int NumSends() const { return HasRings() ? rails_ : 0; }
  __device__ int NumPushes() const { return HasRings() ? call_.num_ranks : rails_; }
  // The streams but those of pushes. Without rings the last of them makes own sums.
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
  __device__ Rail RailOf(int rail) const { return chunks_.RailOf(rail); }
  __device__ static int MessageOf(int chunk) { return CombineChunks<Sum>::MessageOf(chunk); }

  // The tokens' ranks: each rank begins with the next one. Without rings its own are the first.
  __device__ int Source(int stream) const {
    return call_.RankAfter(rank_, HasRings() ? stream + 1 : stream);
  }

  // Flags of the rings are by the tokens' domain, and by the index of the rank that has stored, or
  // for credits of the one that holds the ring.

  // Returns a rank of this domain that has not pushed its sums of a chunk of `domain`, or -1.
  __device__ int MissingPush(int domain, int chunk) const {
    const DomainSlot slot = chunks_.Slot(chunk);
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
      if (!RailOf(rail).HasArrived(MessageOf(chunk))) return rail;
    }
    return -1;
  }

  __device__ void Tell(const Rail& rail) const {
    if (LaneIndex() != 0) return;
    PackHeader(call_, rail, 0, kHeaderBytes, 0, is_poisoned_here_);
    rail.Put(0);
  }
  __device__ void Hear(const Rail& rail) {
    const Outcome outcome = CheckPartner(call_, rail, 0, sequence_);
    if (outcome != Outcome::kArrived) {
      outcome_ = outcome;
    } else if (LoadRelaxedSystem(&rail.Header(0).poisoned) != 0 && outcome_ == Outcome::kArrived) {
      outcome_ = Outcome::kPoisoned;
    }
    __syncwarp();
    if (LaneIndex() == 0) rail.ReturnCredit(0);
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

  const CallParams& call_;
  const HierarchicalLayout& layout_;
  const Domains& domains_;
  const CombineChunks<Sum>& chunks_;
  const uint64_t sequence_;
  const int rank_;
  const int here_;  // this rank's domain
  const int rails_;
  const bool is_poisoned_here_;
  Outcome outcome_ = Outcome::kArrived;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_COMBINE_STREAMS_CUH_
