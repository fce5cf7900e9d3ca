// dispatch_by_plan of few tokens in one kernel, see small.h:
//
//   push    handed out in order: weights go to all ranks, tokens to those that the plan names
//   place   each row waits for its token; rows that come from none are filled
#include "ffi/device/protocol/signal.cuh"
#include "ffi/device/transfer/dispatch_results.cuh"
#include "ffi/device/transfer/low_latency/push.cuh"
#include "ffi/kernels/transfer/params.h"

namespace jax_ep {
namespace {

// Weights to all ranks, tokens to those that the plan names. A plan with a status says nothing, so
// then all tokens go to all ranks. And flags come even if a token has no row there: a plan may be
// wrong, which makes wrong rows, and nobody shall wait for ever.
__device__ void PushByPlan(const LowLatencyRedispatchParams& stage, const EagerBuffers& halves,
                           uint64_t sequence, bool poisoned) {
  const TokenParams& tokens = stage.dispatch.tokens;
  const int num_weight_parts =
      tokens.has_weights ? NumPacketItems(tokens.call.num_assignments()) : 0;
  const auto expert_of = [](int /*choice*/) { return 0; };
  const auto is_for = [&](int peer, int choice) {
    return poisoned || stage.dispatch.plan.destination[choice] == peer;
  };
  Push(stage, halves, sequence, num_weight_parts, expert_of, is_for, true);
}

// A piece of a row, and the choice of all ranks' that it comes from.
struct RowPart {
  int row;
  int piece;
  int source;  // rank; -1 if the row comes from no token
  int choice;
};

// Every num_warps-th piece of all rows, 32 at a time, a lane's each: the plan is far, and much of
// it may be padding. Their number may need more than 32 bits.
class RowParts {
 public:
  __device__ RowParts(const LowLatencyRedispatchParams& stage, int32_t end, int warp, int num_warps)
      : stage_(stage),
        end_(end),
        stride_(stage.pieces.At(32 * num_warps, FastDivmod())),
        next_(
            stage.pieces.At(warp + static_cast<int>(threadIdx.x % 32) * num_warps, FastDivmod())) {}

  // The same in all lanes.
  __device__ bool IsEnd() const { return !__any_sync(kFullWarp, next_.token < end_); }

  // This lane's.
  __device__ RowPart Next() {
    const PlanOperands& plan = stage_.dispatch.plan;
    RowPart part = {next_.token, next_.piece, -1, 0};
    if (part.row < end_ && SourceOfRow(stage_.dispatch.tokens.call, plan, part.row, &part.choice)) {
      part.source = plan.row_source[int64_t{3} * part.row];
    }
    next_.token += stride_.token;
    next_.piece += stride_.piece;
    if (next_.piece >= stage_.pieces.count()) {
      next_.piece -= stage_.pieces.count();
      ++next_.token;
    }
    return part;
  }

 private:
  const LowLatencyRedispatchParams& stage_;
  const int32_t end_;
  const SegmentItem stride_;
  SegmentItem next_;  // its token is a row
};

// The part of the first lane in `lanes`, which leaves them; from no token if there is none.
__device__ RowPart Take(const RowPart& mine, uint32_t* lanes) {
  const int lane = (__ffs(*lanes) - 1) & 31;
  const int source = __shfl_sync(kFullWarp, mine.source, lane);
  const RowPart part = {__shfl_sync(kFullWarp, mine.row, lane),
                        __shfl_sync(kFullWarp, mine.piece, lane), *lanes == 0 ? -1 : source,
                        __shfl_sync(kFullWarp, mine.choice, lane)};
  *lanes &= *lanes - 1;
  return part;
}

// Brings the parts of the first two of `lanes`, which look for what these need, and takes the two
// out: their waits are the same. By one warp.
__device__ Outcome Place(const LowLatencyRedispatchParams& stage, const EagerBuffers& halves,
                         uint64_t sequence, const RowPart& mine, uint32_t* lanes) {
  const TokenParams& tokens = stage.dispatch.tokens;
  const Call& call = tokens.call;
  const int rank = halves.rank();
  const EagerBuffers::Half half = halves.Mine();
  const uint32_t before = *lanes;
  const RowPart parts[] = {Take(mine, lanes), Take(mine, lanes)};
  const bool looks = ((before ^ *lanes) >> (threadIdx.x % 32) & 1) != 0;
  const bool has_weight = looks && tokens.has_weights && mine.piece == 0;
  const uint64_t* const flag =
      &half.flags()[stage.by_top_k.Quotient(mine.choice) * stage.pieces.count() + mine.piece];
  uint64_t packed = 0;
  const Outcome outcome = WaitForSegments(call, sequence, [&] {  // WAIT_SEGMENT
    uint64_t tag = halves.tag();
    if (has_weight) LoadRelaxedSystem(&half.packets()[mine.choice], &packed, &tag);
    bool is_there = tag == halves.tag();
    if (looks && mine.source != rank) is_there &= LoadAcquireSystem(flag) == halves.tag();
    return static_cast<uint32_t>(is_there ? kMaxRanks : mine.source);
  });
  if (outcome != Outcome::kArrived) return outcome;
  if (has_weight) {
    tokens.row_weights[mine.row] = __uint_as_float(static_cast<uint32_t>(packed >> 32));
  }
  const auto copy_of = [&](const RowPart& part) {
    return SegmentCopy(stage.pieces, part.piece, part.source < 0 ? 0 : call.row_vectors);
  };
  SegmentCopy copies[] = {copy_of(parts[0]), copy_of(parts[1])};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const RowPart& part = parts[j];
    const bool is_local = part.source == rank;
    const int place =
        stage.by_top_k.Quotient(part.choice) - (is_local ? rank * call.num_tokens : 0);
    copies[j].Load((is_local ? static_cast<const uint4*>(tokens.x) : half.rows()) +
                   int64_t{place} * call.row_vectors);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    copies[j].Store(static_cast<uint4*>(tokens.rows) + int64_t{parts[j].row} * call.row_vectors);
  }
  return Outcome::kArrived;
}

// All rows, piece by piece, and then those that come from no token. By all warps, each in its turn.
__device__ Outcome PlaceRows(const LowLatencyRedispatchParams& stage, const EagerBuffers& halves,
                             uint64_t sequence) {
  const TokenParams& tokens = stage.dispatch.tokens;
  const PlanOperands& plan = stage.dispatch.plan;
  const int32_t end = EndOfRows(tokens.call, plan);
  const int num_warps = static_cast<int>(gridDim.x) * (kLowLatencyThreads / 32);
  const int warp = static_cast<int>(threadIdx.x / 32 * gridDim.x + blockIdx.x);
  RowParts rows(stage, end, warp, num_warps);
#pragma unroll 1
  while (!rows.IsEnd()) {
    const RowPart mine = rows.Next();
    uint32_t lanes = __ballot_sync(kFullWarp, mine.source >= 0);
#pragma unroll 1
    while (lanes != 0) {
      const Outcome outcome = Place(stage, halves, sequence, mine, &lanes);
      if (outcome != Outcome::kArrived) return outcome;
    }
  }
  int fill = warp - num_warps;
  FillEmptyRows(
      tokens, end, [&] { return fill += num_warps; },
      [&](int row) {
        int choice;
        return row >= end || !SourceOfRow(tokens.call, plan, row, &choice);
      });
  return Outcome::kArrived;
}

}  // namespace

__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    LowLatencyRedispatchKernel(const __grid_constant__ LowLatencyRedispatchParams stage) {
  const TokenParams& tokens = stage.dispatch.tokens;
  const Call& call = tokens.call;
  const uint64_t sequence = CurrentSequence(call);
  const EagerBuffers halves(call, sequence);
  Outcome outcome = PlanOutcome(call, stage.dispatch.plan.status);  // of this thread's warp
  const bool poisoned = outcome != Outcome::kArrived;
  if (HasWorkspace(call)) {
    PushByPlan(stage, halves, sequence, poisoned);
    if (!poisoned) outcome = PlaceRows(stage, halves, sequence);
  }
  const Outcome failure = FinishLowLatencyCall(call, sequence, outcome);
  if (failure != Outcome::kArrived) FillWithNan(tokens, ThreadGroup::Block());
}

}  // namespace jax_ep

#ifndef __CUDACC_RTC__  // a compile check of the device code alone stops here

namespace jax_ep {

const void* LowLatencyRedispatchKernelAddress() {
  return reinterpret_cast<const void*>(LowLatencyRedispatchKernel);
}

}  // namespace jax_ep

#endif  // __CUDACC_RTC__
