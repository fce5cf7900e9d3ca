// The work of a combine over several NVLink domains, chunk by chunk (combine_streams.cuh).
//
// Partial sums of a chunk of tokens are in a ring slot on the rank of this domain that has the
// index of the tokens' rank. With domains of one rank a partial sum is its domain's sum: there are
// no rings, and it is packed, or stored among the results, where Reduce finds it.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_COMBINE_CHUNKS_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_COMBINE_CHUNKS_CUH_

#include "ffi/device/transfer/combine/partial_sums.cuh"
#include "ffi/device/transfer/hierarchical/chunks.cuh"
#include "ffi/device/transfer/hierarchical/combine_params.h"
#include "ffi/device/transfer/hierarchical/domain.cuh"
#include "ffi/device/transfer/hierarchical/forwarding.cuh"
#include "ffi/device/transfer/hierarchical/rail.cuh"

namespace jax_ep {

// `Sum` is called as sum(terms, first, end, to), see SumRows.
template <typename Sum>
class CombineChunks {
 public:
  // A rank with a poisoned plan takes part with no rows.
  __device__ CombineChunks(const HierarchicalCombineParams& params, uint64_t sequence,
                           bool poisoned, Sum sum)
      : params_(params),
        call_(params.combine.call),
        layout_(params.layout),
        domains_(params.layout.domains),
        sequence_(sequence),
        rank_(call_.control->rank),
        here_(domains_.Domain(rank_)),
        end_(poisoned ? 0 : EndOfRows(call_, params.combine.plan)),
        poisoned_(poisoned),
        sum_(sum) {}

  // Whether partial sums go through rings of ranks of this domain, this one included.
  __device__ bool HasRings() const { return domains_.size > 1; }
  // Returns the rank of this domain that adds partial sums of a source's tokens.
  __device__ int Holder(int source) const { return domains_.Partner(source, rank_); }
  // Whether partial sums of a source's tokens go into a message right away.
  __device__ bool IsPacked(int source) const { return !HasRings() && source != rank_; }

  __device__ Rail RailOf(int rail) const { return {call_, layout_, rail}; }
  __device__ Rail RailTo(int source) const {
    return RailOf(domains_.Rail(here_, domains_.Domain(source)));
  }
  // A rail's messages of chunks follow one of metadata.
  __device__ static int MessageOf(int chunk) { return 1 + chunk; }
  __device__ DomainSlot Slot(int chunk) const { return {layout_, sequence_, chunk}; }

  // The functions below are called by one warp, for one token of a chunk.

  // Stores this rank's partial sum of a rank's token.
  __device__ void Push(int source, int chunk, int index) const {
    const CombineParams& combine = params_.combine;
    const int domain = domains_.Domain(source);
    const bool is_packed = IsPacked(source);
    Message to;
    uint64_t tokens = 0;
    if (is_packed) {
      tokens = TokensOf(domain, chunk);
      to = Pack(RailTo(source), chunk, index, tokens);
      if (!IsIn(tokens, index)) return;
    } else if (!HasRings()) {
      const int64_t first = int64_t{chunk} * layout_.chunk_tokens;
      to = {PeerPointer<uint4>(static_cast<uint4*>(combine.out)) + first * call_.result_vectors,
            PeerPointer<float>(combine.assignment_scalars) + first * call_.top_k};
    } else {
      const int holder = Holder(source);
      const int64_t first = SlotTokens(domain, chunk);
      to = {PeerBuffer<uint4>(call_, holder, kReceivedRows) +
                first * call_.num_partial_sums * call_.wire_vectors,
            PeerBuffer<float>(call_, holder, kAssignmentScalars) + first * call_.top_k};
    }
    const TokenRows found = FindRows(call_, combine.plan, end_, source, TokenOf(chunk, index));
    const int place = is_packed ? RowIn(tokens, index) : index;
    SendPartialSum(combine, found, {place, 0, call_.wire_vectors}, to.rows, to.scalars, sum_);
  }

  // Packs the sum of this domain of a rail partner's token.
  __device__ void Send(const Rail& rail, int chunk, int index) const {
    const int domain = rail.domain();
    const uint64_t tokens = TokensOf(domain, chunk);
    const Message to = Pack(rail, chunk, index, tokens);
    if (!IsIn(tokens, index)) return;
    const int64_t slot_token = SlotTokens(domain, chunk) + index;
    const int row = RowIn(tokens, index);
    const float* const from =
        call_.LocalBuffer<const float>(kAssignmentScalars) + slot_token * call_.top_k;
    for (int k = LaneIndex(); params_.combine.has_scalars && k < call_.top_k; k += 32) {
      StoreToPeer(to.scalars + (row * call_.top_k + k), LoadGlobalNoAllocate(&from[k]));
    }
    sum_(PartialSums(slot_token, NumPartialSums(domain, TokenOf(chunk, index))), 0,
         call_.wire_vectors, to.rows + int64_t{row} * call_.wire_vectors);
  }

  // Adds the sums of all domains of this rank's token, in order.
  __device__ void Reduce(int chunk, int index) const {
    const int token = TokenOf(chunk, index);
    const CombineParams& combine = params_.combine;
    const int64_t slot_token = SlotTokens(here_, chunk) + index;
    const int num_sums = NumPartialSums(here_, token);
    const int num_inner = IsOnePass() ? num_sums : 0;
    const uint4* const own = IsOnePass() ? nullptr : OwnSum(slot_token, token, num_sums);
    NestedSumTerms<2> terms;
    terms.assignments = 0;
    terms.num_inner = num_inner;
    for (int i = 0; i < 2; ++i) {
      const int term = LaneIndex() + 32 * i;
      const int domain = term - num_inner;
      const uint4* const row = domain < 0        ? PartialRow(slot_token, term)
                               : domain == here_ ? own
                                                 : AddendOf(domain, chunk, index).row;
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

 private:
  // The ranks of this domain that have a partial sum of a token of a rail's domain, or of this one.
  __device__ int NumPartialSums(int domain, int token) const {
    const uint32_t* const ranks =
        TokenRanks(call_, domains_, params_.forwarding.token_ranks, domain, token);
    const int words = poisoned_ ? 0 : TokenRankWords(domains_);
    int count = 0;
    for (int word = 0; word < words; ++word) count += __popc(ranks[word]);
    return min(count, call_.num_partial_sums);
  }
  // Called by one warp. Returns the tokens of a chunk of `domain` that have partial sums here.
  __device__ uint64_t TokensOf(int domain, int chunk) const {
    return TokensWhere(call_, layout_, chunk,
                       [&](int token) { return NumPartialSums(domain, token) > 0; });
  }

  __device__ int TokenOf(int chunk, int index) const {
    return chunk * layout_.chunk_tokens + index;
  }

  // Returns the first token of a ring slot, among those of all rings, which are by domain.
  __device__ int64_t SlotTokens(int domain, int chunk) const {
    return (int64_t{domain} * layout_.domain_slots + Slot(chunk).slot) * layout_.chunk_tokens;
  }

  // A message has a scalar for each assignment of its tokens, if there are any, then rows.
  __device__ int64_t RowsOffset() const {
    const int64_t scalars = params_.combine.has_scalars
                                ? int64_t{layout_.chunk_tokens} * call_.top_k * sizeof(float)
                                : 0;
    return kHeaderBytes + CeilDivide(scalars, kHeaderBytes) * kHeaderBytes;
  }

  // A message to a rail partner, while it is packed: scalars and rows. The first unit packs the
  // header.
  struct Message {
    PeerPointer<uint4> rows;
    PeerPointer<float> scalars;
  };
  __device__ Message Pack(const Rail& rail, int chunk, int index, uint64_t tokens) const {
    const PeerPointer<uint8_t> to = rail.Packed(MessageOf(chunk));
    const int64_t row_bytes = int64_t{call_.wire_vectors} * sizeof(uint4);
    if (index == 0 && LaneIndex() == 0) {
      PackHeader(call_, rail, MessageOf(chunk), RowsOffset() + __popcll(tokens) * row_bytes, tokens,
                 false);
    }
    return {(to + RowsOffset()).template As<uint4>(), (to + kHeaderBytes).template As<float>()};
  }

  // Returns a partial sum of a token in a slot.
  __device__ uint4* PartialRow(int64_t slot_token, int index) const {
    return call_.LocalBuffer<uint4>(kReceivedRows) +
           (slot_token * call_.num_partial_sums + index) * call_.wire_vectors;
  }

  // Returns the partial sums of a token in a slot, as terms in rank order.
  __device__ SumTerms<2> PartialSums(int64_t slot_token, int count) const {
    SumTerms<2> terms;
    terms.assignments = count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
    for (int i = 0; i < 2; ++i) {
      terms.rows[i] = reinterpret_cast<uint64_t>(PartialRow(slot_token, LaneIndex() + 32 * i));
      terms.weights[i] = 1;
    }
    return terms;
  }

  // Whether a token's partial sums are added in the pass that adds the other domains' sums to them.
  // They are the first terms, so this domain comes first, or there is but one other: the order of
  // two does not matter.
  __device__ bool IsOnePass() const {
    const bool has_lanes = call_.num_partial_sums + domains_.count <= 64;
    return HasRings() && has_lanes && (here_ == 0 || domains_.count == 2);
  }

  // Called by one warp. Makes the sum of this domain, which takes the place of a partial sum. Each
  // lane reads again what it has stored. Without rings it is among the results. Null if there is
  // none.
  __device__ const uint4* OwnSum(int64_t slot_token, int token, int num_sums) const {
    if (num_sums == 0) return nullptr;
    if (!HasRings()) {
      return static_cast<const uint4*>(params_.combine.out) + int64_t{token} * call_.result_vectors;
    }
    uint4* const own = PartialRow(slot_token, 0);
    if (num_sums > 1) {
      sum_(PartialSums(slot_token, num_sums), 0, call_.wire_vectors, PeerPointer<uint4>(own));
      FenceBlock();
    }
    return own;
  }

  // Another domain's sum of a token, and its scalars; null if it has none.
  struct Addend {
    const uint4* row = nullptr;
    const float* scalars = nullptr;
  };
  __device__ Addend AddendOf(int domain, int chunk, int index) const {
    if (domain >= domains_.count) return {};
    const Rail rail = RailOf(domains_.Rail(here_, domain));
    const uint64_t tokens = LoadRelaxedSystem(&rail.Header(MessageOf(chunk)).tokens);
    if (!IsIn(tokens, index)) return {};
    const int row = RowIn(tokens, index);
    const uint8_t* const from = rail.Received(MessageOf(chunk));
    return {reinterpret_cast<const uint4*>(from + RowsOffset()) + int64_t{row} * call_.wire_vectors,
            reinterpret_cast<const float*>(from + kHeaderBytes) + row * call_.top_k};
  }

  const HierarchicalCombineParams& params_;
  const CallParams& call_;
  const HierarchicalLayout& layout_;
  const Domains& domains_;
  const uint64_t sequence_;
  const int rank_;
  const int here_;  // this rank's domain
  const int32_t end_;
  const bool poisoned_;  // this rank's plan
  const Sum sum_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_COMBINE_CHUNKS_CUH_
