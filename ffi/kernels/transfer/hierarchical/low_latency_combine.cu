// Low-latency combine over several NVLink domains, in one kernel (low_latency/layout.h). Every
// block
//
//   1. inverts the plan in the workspace, a share of it;
//   2. takes segments of this rank's partial sums, and stores them to the rank of this domain that
//      has the index of the token's rank, the holder. With domains of one rank they are their
//      domain's sums: those of other ranks' tokens are packed into messages at once;
//   3. as holder, adds the partial sums of partners' tokens in rank order, and packs the sums;
//   4. adds the sums of the domains of this rank's tokens in order, its own included.
//
// Shared memory: a SumPipeline per warp.
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/protocol/work_items.cuh"
#include "ffi/device/transfer/combine/partial_sums.cuh"
#include "ffi/device/transfer/hierarchical/forwarding.cuh"
#include "ffi/device/transfer/hierarchical/low_latency/end.cuh"
#include "ffi/device/transfer/hierarchical/low_latency/packing.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

constexpr int kDomainSumStages = 4;
using DomainSumPipeline = SumPipeline<kDomainSumStages>;
static_assert(DomainSumPipeline::kBytes == kLowLatencySumPipelineBytes);

// Not inlined: all sums share its instructions, which are then fetched once.
template <typename Type>
__device__ __noinline__ void SumDomainSegment(DomainSumPipeline pipeline, const SumTerms<1>& terms,
                                              int first, int end, PeerPointer<uint4> to) {
  SumRows<Type>(pipeline, terms, first, end, to);
}

// Messages have a scalar for each assignment of their tokens, if there are any, then rows.
__device__ int64_t RowsOffset(const HierarchicalLowLatencyCombineParams& params) {
  const int64_t scalars = int64_t{params.layout.chunk_tokens} * params.combine.call.top_k *
                          static_cast<int64_t>(sizeof(float));
  return kHeaderBytes +
         (params.combine.has_scalars ? CeilDivide(scalars, kHeaderBytes) * kHeaderBytes : 0);
}

template <typename Sum>
class SegmentCombiner {
 public:
  // A rank with a poisoned plan takes part with no rows.
  __device__ SegmentCombiner(const HierarchicalLowLatencyCombineParams& params,
                             const DomainEagerBuffers& eager, uint64_t sequence, bool poisoned,
                             Sum sum)
      : params_(params),
        combine_(params.combine),
        call_(params.combine.call),
        layout_(params.layout),
        domains_(params.layout.domains),
        sizes_(params.sizes),
        eager_(eager),
        sequence_(sequence),
        rank_(eager.rank()),
        here_(domains_.Domain(rank_)),
        end_(poisoned ? 0 : EndOfRows(call_, params.combine.plan)),
        rows_offset_(RowsOffset(params)),
        poisoned_(poisoned),
        packed_(params.combine.call, params.layout, params.sizes, rows_offset_),
        sum_(sum) {}

  // Called by all warps. No item waits for another one, so tickets are prefetched.
  __device__ Outcome SendPartialSums() {
    const int num_items = call_.num_ranks * NumSegments();
    SegmentFlags flags(eager_);
    InjectDelay(call_, sequence_, 4);
    if (!MayStoreToPeers(call_)) return Outcome::kArrived;  // the next wait finds the abort
    WarpTicketPrefetch tickets(&call_.control->progress.low_latency_tickets);
#pragma unroll 1
    for (int ticket; (ticket = tickets.Next()) < num_items;) {
      // With the first item: neighbors detect a mismatch, or a poisoned plan.
      if (ticket == 0) SignalDomainEntry(call_, domains_, sequence_, poisoned_);
      const SegmentItem item = sizes_.segments.Item(ticket, sizes_.num_ranks_divmod);
      const int owner = call_.RankAfter(rank_, 1 + item.peer);
      if (domains_.size > 1 || owner == rank_) {
        SendToHolder(owner, item, &flags);
        continue;
      }
      const Outcome outcome = PackPartialSum(owner, item);
      if (outcome != Outcome::kArrived) return outcome;
    }
    packed_.Count();
    flags.Signal();
    return Outcome::kArrived;
  }

  // Called by all warps. Tells the partners whether a plan of this domain is poisoned, then sends
  // them the sums of this domain.
  __device__ Outcome SendDomainSums() {
    const int num_items = 1 + (domains_.size > 1 ? domains_.num_rails() * NumSegments() : 0);
    auto outcome = Outcome::kArrived;
#pragma unroll 1
    while (outcome == Outcome::kArrived) {
      const int ticket = NextWarpTicket(&call_.control->progress.warp_tickets);
      if (ticket >= num_items) break;
      outcome = ticket == 0
                    ? TellPartners()
                    : SendDomainSum(sizes_.segments.Item(ticket - 1, sizes_.num_rails_divmod));
    }
    if (outcome == Outcome::kArrived) packed_.Count();
    return outcome;
  }

  // Called by all warps. Adds the sums of the domains, in a static order.
  __device__ Outcome ReduceTokens(const RoleContext& role) {
    const int num_items = NumSegments();
#pragma unroll 1
    for (int index = role.GridWarp(); index < num_items; index += role.NumGridWarps()) {
      const Outcome outcome = ReduceToken(sizes_.segments.Item(index, FastDivmod()));
      if (outcome != Outcome::kArrived) return outcome;
    }
    return Outcome::kArrived;
  }

 private:
  __device__ int NumSegments() const { return call_.num_tokens * sizes_.segments.count(); }
  __device__ int First(const SegmentItem& item) const {
    return sizes_.segments.First(item.segment);
  }
  __device__ int End(const SegmentItem& item) const {
    return sizes_.segments.End(item.segment, call_.wire_vectors);
  }

  // Partial sums of a token, and their flags, are on its holder, by the token's domain.
  __device__ int HeldToken(int domain, int token) const {
    return domain * call_.num_tokens + token;
  }
  __device__ int FirstFlag(int domain, const SegmentItem& item) const {
    return (HeldToken(domain, item.token) * sizes_.segments.count() + item.segment) * domains_.size;
  }

  // The ranks of this domain that have a partial sum of a token.
  __device__ int NumPartialSums(int domain, int token) const {
    if (poisoned_) return 0;
    const uint32_t ranks =
        *TokenRanks(call_, domains_, params_.forwarding.token_ranks, domain, token);
    return min(__popc(ranks), call_.num_partial_sums);
  }
  // Called by one warp. The tokens of a chunk of a partner that have a sum in this domain.
  __device__ uint64_t TokensOf(int domain, int chunk) const {
    return TokensWhere(call_, layout_, chunk,
                       [&](int token) { return NumPartialSums(domain, token) > 0; });
  }

  // Called by one warp. Returns this rank's rows of a token, whose top-k is at most 32.
  __device__ TokenRowsPerLane<1> RowsOf(int owner, int token) const {
    const TokenRows found = FindRows(call_, combine_.plan, end_, owner, token);
    return {{found.rows[0]}, found.assignments};
  }

  // It sets the flag even if there are no rows: with a wrong plan the holder must not wait forever.
  __device__ void SendToHolder(int owner, const SegmentItem& item, SegmentFlags* flags) {
    const int domain = domains_.Domain(owner);
    const int holder = domains_.Partner(owner, rank_);
    const auto to = eager_.At(holder);
    const TokenSegment segment = {HeldToken(domain, item.token), First(item), End(item)};
    SendPartialSum(combine_, RowsOf(owner, item.token), segment, to.rows(), to.scalars(), sum_);
    flags->Add(to.flags() + (FirstFlag(domain, item) + domains_.Index(rank_)));
  }

  // A token's place in a message, while it is packed.
  struct PackedToken {
    PeerPointer<uint4> rows;
    PeerPointer<float> scalars;
  };
  __device__ PackedToken Packed(const Rail& rail, int chunk) const {
    const PeerPointer<uint8_t> to = rail.Packed(HierarchicalSegments::MessageOf(chunk));
    return {(to + rows_offset_).template As<uint4>(), (to + kHeaderBytes).template As<float>()};
  }

  __device__ Outcome PackPartialSum(int owner, const SegmentItem& item) {
    const Rail rail(call_, layout_, domains_.Rail(here_, domains_.Domain(owner)));
    const int chunk = sizes_.Chunk(item.token);
    const uint64_t tokens = TokensOf(rail.domain(), chunk);
    const TokenRowsPerLane<1> found = RowsOf(owner, item.token);
    const Outcome outcome =
        WaitForCredit(call_, layout_, sequence_, rail, HierarchicalSegments::MessageOf(chunk));
    if (outcome != Outcome::kArrived) return outcome;
    const int index = sizes_.IndexInChunk(item.token);
    if (IsIn(tokens, index)) {
      const PackedToken to = Packed(rail, chunk);
      const TokenSegment segment = {RowIn(tokens, index), First(item), End(item)};
      SendPartialSum(combine_, found, segment, to.rows, to.scalars, sum_);
    }
    packed_.Add(rail.index(), chunk, tokens);
    return Outcome::kArrived;
  }

  // Called by one warp. All that the partners need to know of entry is known when the domain has
  // entered the call.
  __device__ Outcome TellPartners() const {
    const Outcome entry = WaitForDomainEntry(call_, domains_, sequence_);
    const bool is_poisoned = poisoned_ || entry == Outcome::kPoisoned;
    if (entry != Outcome::kArrived && entry != Outcome::kPoisoned) return entry;
    const Outcome outcome = WaitForAllCredits(call_, layout_, sequence_);
    if (outcome != Outcome::kArrived) return outcome;
    if (LaneIndex() < domains_.num_rails()) {
      const Rail rail(call_, layout_, LaneIndex());
      PackHeader(call_, rail, 0, kHeaderBytes, 0, is_poisoned);
      rail.Put(0);
    }
    return Outcome::kArrived;
  }

  // Called by one warp. Returns a rank of this domain whose partial sum is missing in a lane, or
  // kMaxRanks. Acquire. EAGER_WAIT_PARTIALS
  __device__ uint32_t MissingPartialSum(int domain, const SegmentItem& item) const {
    const int index = LaneIndex();
    const uint64_t* const flags = &eager_.Local().flags()[FirstFlag(domain, item)];
    const bool is_missing =
        index < domains_.size && LoadAcquireSystem(&flags[index]) != eager_.tag();
    return static_cast<uint32_t>(is_missing ? domains_.Rank(here_, index) : kMaxRanks);
  }

  // Returns the partial sums of a token, as terms in rank order.
  __device__ SumTerms<1> PartialSums(int domain, int token, int count) const {
    const uint4* const from = eager_.Local().rows() + int64_t{HeldToken(domain, token)} *
                                                          call_.num_partial_sums *
                                                          call_.wire_vectors;
    SumTerms<1> terms;
    terms.assignments = (uint64_t{1} << count) - 1;
    terms.rows[0] = reinterpret_cast<uint64_t>(from + int64_t{LaneIndex()} * call_.wire_vectors);
    terms.weights[0] = 1;
    return terms;
  }
  __device__ const float* HeldScalars(int domain, int token) const {
    return eager_.Local().scalars() + HeldToken(domain, token) * call_.top_k;
  }

  // Called by one warp.
  __device__ Outcome SendDomainSum(const SegmentItem& item) {
    const Rail rail(call_, layout_, item.peer);
    const int domain = rail.domain();
    const int chunk = sizes_.Chunk(item.token);
    const uint64_t tokens = TokensOf(domain, chunk);
    const int count = NumPartialSums(domain, item.token);
    Outcome outcome =
        WaitForCredit(call_, layout_, sequence_, rail, HierarchicalSegments::MessageOf(chunk));
    if (outcome != Outcome::kArrived) return outcome;
    outcome = WaitForSegments(call_, layout_, sequence_,
                              [&] { return MissingPartialSum(domain, item); });  // WAIT_SEGMENT
    if (outcome != Outcome::kArrived) return outcome;
    const int index = sizes_.IndexInChunk(item.token);
    if (IsIn(tokens, index)) {
      const PackedToken to = Packed(rail, chunk);
      const int row = RowIn(tokens, index);
      const int k = LaneIndex();
      if (combine_.has_scalars && item.segment == 0 && k < call_.top_k) {
        StoreToPeer(to.scalars + (row * call_.top_k + k),
                    LoadGlobalNoAllocate(&HeldScalars(domain, item.token)[k]));
      }
      sum_(PartialSums(domain, item.token, count), First(item), End(item),
           to.rows + int64_t{row} * call_.wire_vectors);
    }
    packed_.Add(item.peer, chunk, tokens);
    return Outcome::kArrived;
  }

  // Called by one warp. Makes the sum of this domain, which takes the place of a term that each
  // lane has read then. Null if there is none.
  __device__ const uint4* OwnSum(const SegmentItem& item, int count) const {
    if (count == 0) return nullptr;
    const SumTerms<1> terms = PartialSums(here_, item.token, count);
    auto* const first = reinterpret_cast<uint4*>(__shfl_sync(kFullWarp, terms.rows[0], 0));
    if (count > 1) {
      sum_(terms, First(item), End(item), PeerPointer<uint4>(first));
      FenceBlock();  // each lane reads again what it has stored
    }
    return first;
  }

  // Called by one warp. Adds a segment of the sums of all domains of one of this rank's tokens.
  __device__ Outcome ReduceToken(const SegmentItem& item) const {
    const int token = item.token;
    const int message = HierarchicalSegments::MessageOf(sizes_.Chunk(token));
    const int count = NumPartialSums(here_, token);
    const int k = LaneIndex();
    const int32_t destination =
        k < call_.top_k ? combine_.plan.destination[token * call_.top_k + k] : -1;
    const Outcome outcome = WaitForSegments(call_, layout_, sequence_, [&] {  // WAIT_SEGMENT
      uint32_t missing = MissingPartialSum(here_, item);
      if (LaneIndex() < domains_.num_rails()) {
        const Rail rail(call_, layout_, LaneIndex());
        if (!rail.HasArrived(message)) missing = min(missing, uint32_t(rail.partner()));
      }
      return missing;
    });
    if (outcome != Outcome::kArrived) return outcome;
    if (combine_.has_scalars && item.segment == 0 && k < call_.top_k) {
      combine_.assignment_scalars[token * call_.top_k + k] = Scalar(token, k, destination);
    }
    const uint4* const own = OwnSum(item, count);
    const int domain = LaneIndex();
    const uint4* row = domain == here_ ? own : nullptr;
    if (domain < domains_.count && domain != here_) {
      const ReceivedRow received(sizes_, Rail(call_, layout_, domains_.Rail(here_, domain)), token);
      if (received.is_there) row = received.Vectors(call_, rows_offset_);
    }
    SumTerms<1> terms;
    terms.rows[0] = reinterpret_cast<uint64_t>(row);
    terms.weights[0] = 1;
    terms.assignments = __ballot_sync(kFullWarp, row != nullptr);
    uint4* const to = static_cast<uint4*>(combine_.out) + int64_t{token} * call_.result_vectors;
    sum_(terms, First(item), End(item), PeerPointer<uint4>(to));
    return Outcome::kArrived;
  }

  // Returns the scalar of an assignment of this rank; 0 if it is not kept.
  __device__ float Scalar(int token, int k, int32_t destination) const {
    if (destination < 0 || destination >= call_.num_ranks) return 0;
    const int domain = domains_.Domain(destination);
    if (domain == here_) return LoadGlobalNoAllocate(&HeldScalars(here_, token)[k]);
    const ReceivedRow received(sizes_, Rail(call_, layout_, domains_.Rail(here_, domain)), token);
    if (!received.is_there) return 0;
    const auto* const scalars = reinterpret_cast<const float*>(received.message + kHeaderBytes);
    return LoadGlobalNoAllocate(&scalars[received.row * call_.top_k + k]);
  }

  const HierarchicalLowLatencyCombineParams& params_;
  const CombineParams& combine_;
  const CallParams& call_;
  const HierarchicalLayout& layout_;
  const Domains& domains_;
  const HierarchicalSegments& sizes_;
  const DomainEagerBuffers& eager_;
  const uint64_t sequence_;
  const int rank_;
  const int here_;  // this rank's domain
  const int32_t end_;
  const int64_t rows_offset_;
  const bool poisoned_;  // this rank's plan
  PackedSegments packed_;
  const Sum sum_;
};

// Called by all warps. A rank with a poisoned plan takes part, or its peers would wait.
template <typename Type>
__device__ Outcome CombineTokens(const HierarchicalLowLatencyCombineParams& params,
                                 const RoleContext& role, const DomainEagerBuffers& eager,
                                 uint64_t sequence, bool poisoned) {
  const DomainSumPipeline pipeline(role);
  const auto sum = [&](const SumTerms<1>& terms, int first, int end, PeerPointer<uint4> to) {
    SumDomainSegment<Type>(pipeline, terms, first, end, to);
  };
  SegmentCombiner combiner(params, eager, sequence, poisoned, sum);
  Outcome outcome = combiner.SendPartialSums();
  if (outcome == Outcome::kArrived) outcome = combiner.SendDomainSums();
  if (outcome != Outcome::kArrived) return outcome;
  return poisoned ? PlanOutcome(params.combine.call, role, 1) : combiner.ReduceTokens(role);
}

}  // namespace

template <typename Type>
__global__ void __launch_bounds__(kLowLatencyThreads, 1) HierarchicalLowLatencyCombineKernel(
    const __grid_constant__ HierarchicalLowLatencyCombineParams params) {
  const ProfileKernel profile(ProfiledKernel::kHierarchicalLowLatencyCombine);
  const CombineParams& combine = params.combine;
  const CallParams& call = combine.call;
  Progress& progress = call.control->progress;
  __shared__ RoleScratch scratch;
  const RoleContext role = RoleContext::WholeBlock(&scratch);
  const uint64_t sequence = BeginCall(call, role);
  if (sequence == 0) return FillWithNan(combine, role.GridThreads());
  const bool poisoned = *combine.plan.status != 0;
  const DomainEagerBuffers eager(call, sequence,
                                 DomainEagerLayout(call, params.sizes.eager_offset));
  auto outcome = Outcome::kArrived;  // this warp's
  if (HasWorkspace(call)) {
    for (int ticket;
         (ticket = NextTicket(&progress.block_tickets, role)) < call.num_prologue_items;) {
      InvertRows(call, combine.plan, ticket, call.num_prologue_items, role.BlockThreads());
      FinishItem(&progress.items_finished, false, role);
    }
    // The barrier makes the items' results visible to all threads.
    if (role.Thread() == 0) WaitForItems(&progress.items_finished, call.num_prologue_items);
    role.Sync();
    outcome = CombineTokens<Type>(params, role, eager, sequence, poisoned);
  }
  FinishLowLatencyCall(call, params.layout, role, sequence, outcome,
                       [&](Outcome) { FillWithNan(combine, role.BlockThreads()); });
}

template __global__ void HierarchicalLowLatencyCombineKernel<BFloat16>(
    const __grid_constant__ HierarchicalLowLatencyCombineParams params);
template __global__ void HierarchicalLowLatencyCombineKernel<Float16>(
    const __grid_constant__ HierarchicalLowLatencyCombineParams params);
template __global__ void HierarchicalLowLatencyCombineKernel<Float32>(
    const __grid_constant__ HierarchicalLowLatencyCombineParams params);

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // NVRTC compiles the device code only

namespace jax_ep {

const void* HierarchicalLowLatencyCombineKernelAddress(RowType type) {
  switch (type) {
    case RowType::kBFloat16:
      return reinterpret_cast<const void*>(HierarchicalLowLatencyCombineKernel<BFloat16>);
    case RowType::kFloat16:
      return reinterpret_cast<const void*>(HierarchicalLowLatencyCombineKernel<Float16>);
    case RowType::kFloat32:
      return reinterpret_cast<const void*>(HierarchicalLowLatencyCombineKernel<Float32>);
  }
  return nullptr;
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
