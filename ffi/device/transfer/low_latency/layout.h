// Low-latency calls: latency, not bandwidth, determines their time. Each rank
// pushes its rows to the peers' eager buffers (eager_layout.h) without a wait, in row segments that
// have flags of their own. A receiver waits once, for flags.
#ifndef JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_LAYOUT_H_
#define JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_LAYOUT_H_

#include "ffi/device/common/fast_divmod.h"
#include "ffi/device/transfer/eager_layout.h"
#include "ffi/device/transfer/plan.h"

namespace jax_ep {

inline constexpr int64_t kMaxLowLatencyTopK = 32;     // a lane for each assignment
inline constexpr int64_t kMaxSegmentVectors = 128;    // 4 in flight per lane
inline constexpr int64_t kMaxSegmentScaleWords = 64;  // 2 likewise

// A segment of a token's row, from or to a peer.
struct SegmentItem {
  int32_t peer;  // index among the peers
  int32_t segment;
  int32_t token;
};

// The segments of rows; a warp processes one at a time. Item indices run through the peers first,
// so that all links carry data at once, then through a row.
class RowSegments {
 public:
  RowSegments() = default;
  RowSegments(int32_t count, int32_t vectors, int32_t num_scale_words)
      : count_(count),
        vectors_(vectors),
        scale_words_(CeilDivide(num_scale_words, Max(count, 1))),
        count_divmod_(Max(count, 1)) {}

  JAX_EP_HOST_DEVICE int32_t count() const { return count_; }  // per row; 0: not a low-latency call
  JAX_EP_HOST_DEVICE int32_t First(int32_t segment) const { return segment * vectors_; }
  JAX_EP_HOST_DEVICE int32_t End(int32_t segment, int32_t row_vectors) const {
    return Min((segment + 1) * vectors_, row_vectors);
  }
  JAX_EP_HOST_DEVICE int32_t FirstScaleWord(int32_t segment) const {
    return segment * scale_words_;
  }
  JAX_EP_HOST_DEVICE int32_t EndScaleWord(int32_t segment, int32_t num_scale_words) const {
    return Min((segment + 1) * scale_words_, num_scale_words);
  }
  JAX_EP_HOST_DEVICE SegmentItem Item(int32_t index, const FastDivmod& num_peers_divmod) const {
    const int32_t segments = num_peers_divmod.Quotient(index);
    return {num_peers_divmod.Remainder(index), count_divmod_.Remainder(segments),
            count_divmod_.Quotient(segments)};
  }

 private:
  int32_t count_ = 0;
  int32_t vectors_ = 0;      // 16-byte vectors per segment
  int32_t scale_words_ = 0;  // per segment, at most kMaxSegmentScaleWords
  FastDivmod count_divmod_;
};

// Plans some thousands of segments if rows are long enough: about two per warp of a large GPU. None
// is longer than kMaxSegmentVectors, because the rows have at most that many vectors per wanted
// segment. Returns no segments for calls that are not low-latency ones. That follows from static
// shapes alone, because all ranks have to agree.
//
// `row_vectors` are those of the payload. Each segment has a share of the scales, too.
inline RowSegments PlanRowSegments(int64_t num_ranks, int64_t num_tokens, int64_t top_k,
                                   int64_t row_vectors, int64_t num_scale_words = 0) {
  constexpr int64_t kWanted = 4096;
  static_assert(kEagerRowBytes / 16 <= kWanted * kMaxSegmentVectors,
                "a segment is at most kMaxSegmentVectors");
  constexpr int64_t kMinVectors = 64;
  const int64_t rows = num_ranks * num_tokens;
  if (rows <= 0 || row_vectors <= 0 || top_k > kMaxLowLatencyTopK ||
      rows > kMaxLowLatencySegments || rows * top_k > kMaxLowLatencyAssignments ||
      rows * (row_vectors + CeilDivide(num_scale_words, 4)) * 16 > kEagerRowBytes) {
    return {};
  }
  const int64_t wanted = CeilDivide(row_vectors, CeilDivide(kWanted, rows));
  const int64_t vectors = Max(wanted, Min(row_vectors, kMinVectors));
  return {static_cast<int32_t>(CeilDivide(row_vectors, vectors)), static_cast<int32_t>(vectors),
          static_cast<int32_t>(num_scale_words)};
}

// The warps of a block that count assignments, while the others push.
inline constexpr int kCountingWarps = 8;

// The ranges of a rank's assignments; a warp counts one range.
struct AssignmentRanges {
  int32_t count;
  int32_t log2_assignments;  // per range, at least 32
};

inline AssignmentRanges PlanAssignmentRanges(int64_t num_ranks, int64_t num_assignments) {
  const auto ranks = static_cast<int32_t>(num_ranks);
  AssignmentRanges ranges = {Max(kCountingWarps / ranks, 1), 5};
  while (int64_t{ranges.count} << ranges.log2_assignments < num_assignments) {
    ++ranges.log2_assignments;
  }
  return ranges;
}

// Returns the bytes of shared memory of a BlockPlan (block_plan.cuh).
inline int64_t BlockPlanBytes(int64_t num_ranks, int64_t num_assignments, int64_t num_experts) {
  const int64_t range_count = PlanAssignmentRanges(num_ranks, num_assignments).count;
  const int64_t bins = num_ranks * (range_count + 1) * (num_experts + 1);
  return 8 * num_ranks * num_assignments + 4 * (bins + QuotaWords(num_ranks, num_experts));
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_LAYOUT_H_
