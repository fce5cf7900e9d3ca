// The row segments of a low-latency redispatch, in the order of the plan.
#ifndef JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_PLANNED_SEGMENTS_CUH_
#define JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_PLANNED_SEGMENTS_CUH_

#include "ffi/device/transfer/dispatch/results.cuh"
#include "ffi/device/transfer/low_latency/row_segments.cuh"
#include "ffi/device/transfer/plan_rows.cuh"

namespace jax_ep {

// A segment of a row, and the assignment of [R][T][K] that it comes from.
struct RowSegmentItem {
  int row;
  int segment;
  int source;  // rank; -1 if the row comes from no token
  int assignment;
};

// Every num_warps-th segment of all rows, one per lane: 32 loads of the plan are in flight, and
// much of it may be padding. The number of segments may need more than 32 bits.
class RowSegmentItems {
 public:
  __device__ RowSegmentItems(const CallParams& call, const PlanOperands& plan,
                             const RowSegments& segments, int32_t end, int warp, int num_warps)
      : call_(call),
        plan_(plan),
        segments_(segments),
        end_(end),
        stride_(segments.Item(32 * num_warps, FastDivmod())),
        next_(segments.Item(warp + LaneIndex() * num_warps, FastDivmod())) {}

  // Returns the same in all lanes.
  __device__ bool IsEnd() const { return !__any_sync(kFullWarp, next_.token < end_); }

  // Returns this lane's next segment.
  __device__ RowSegmentItem Next() {
    RowSegmentItem item = {next_.token, next_.segment, -1, 0};
    if (item.row < end_ && FindAssignment(call_, plan_, item.row, &item.assignment)) {
      item.source = plan_.row_source[int64_t{3} * item.row];
    }
    next_.token += stride_.token;
    next_.segment += stride_.segment;
    if (next_.segment >= segments_.count()) {
      next_.segment -= segments_.count();
      ++next_.token;
    }
    return item;
  }

 private:
  const CallParams& call_;
  const PlanOperands& plan_;
  const RowSegments& segments_;
  const int32_t end_;
  const SegmentItem stride_;
  SegmentItem next_;  // its token is the row
};

// Returns the item of the first lane in `lanes`, and removes that lane. If there is none, the item
// comes from no token.
__device__ inline RowSegmentItem Take(const RowSegmentItem& mine, uint32_t* lanes) {
  const int lane = (__ffs(*lanes) - 1) & 31;
  const int source = __shfl_sync(kFullWarp, mine.source, lane);
  const RowSegmentItem item = {
      __shfl_sync(kFullWarp, mine.row, lane), __shfl_sync(kFullWarp, mine.segment, lane),
      *lanes == 0 ? -1 : source, __shfl_sync(kFullWarp, mine.assignment, lane)};
  *lanes &= *lanes - 1;
  return item;
}

// Called by all `num_warps` warps of the grid. Copies all segments by copy(mine, lanes), which
// copies those of some lanes in `lanes`, and removes them. Then fills the rows that come from no
// token, in a static order.
template <typename Copy>
__device__ inline Outcome CopyPlannedRows(const TokenParams& tokens, const PlanOperands& plan,
                                          const RowSegments& segments, const RoleContext& role,
                                          uint64_t sequence, int num_warps, Copy copy) {
  const int32_t end = EndOfRows(tokens.call, plan);
  const int warp = role.GridWarp();
  RowSegmentItems items(tokens.call, plan, segments, end, warp, num_warps);
  {
    const ProfileSpan span(SpanKind::kExpand);
#pragma unroll 1
    while (!items.IsEnd()) {
      const RowSegmentItem mine = items.Next();
      uint32_t lanes = __ballot_sync(kFullWarp, mine.source >= 0);
#pragma unroll 1
      while (lanes != 0) {
        const Outcome outcome = copy(mine, &lanes);
        if (outcome != Outcome::kArrived) return outcome;
      }
    }
  }
  int item = warp - num_warps;
  FillEmptyRows(
      tokens, sequence, end, [&] { return item += num_warps; },
      [&](int row) {
        int assignment;
        return row >= end || !FindAssignment(tokens.call, plan, row, &assignment);
      });
  return Outcome::kArrived;
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_PLANNED_SEGMENTS_CUH_
