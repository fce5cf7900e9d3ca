// Small calls: of so few tokens that what they take is one wait after another. Every rank pushes at
// once to each peer what that one needs, into memory of its own, each piece with a flag.
//
// Nobody waits before it pushes: the memory has two halves, used in turn. All ranks wait in every
// call until all have entered it. So in call e all have entered e - 1 and ended e - 2, whose half
// it was. Every dispatch pushes its counts like this.
#ifndef JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_LAYOUT_H_
#define JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_LAYOUT_H_

#include "ffi/device/protocol/call.h"

namespace jax_ep {

// Of each half of the buffers (call.h).
inline constexpr int64_t kEagerRowBytes = int64_t{8} << 20;
inline constexpr int64_t kMaxLowLatencyAssignments = 8192;  // R * T * K
inline constexpr int64_t kMaxLowLatencySegments = 8192;     // R * T * pieces of a row

inline constexpr int64_t kMaxLowLatencyTopK = 32;   // a lane for each choice
inline constexpr int64_t kMaxSegmentVectors = 128;  // 4 of 16 bytes for each lane, at once

// A choice, with what says of which call it is: 16 bytes that are stored and loaded at once.
struct AssignmentPacket {
  int32_t expert;
  float weight;
  uint64_t tag;
};
static_assert(sizeof(AssignmentPacket) == 16);

// How many choices of two experts a rank has; likewise.
struct CountPacket {
  int32_t counts[2];
  uint64_t tag;
};
static_assert(sizeof(CountPacket) == 16);

// Pairs of bins: the experts, and one for bad ids.
JAX_EP_HOST_DEVICE constexpr int32_t CountPairs(int32_t num_experts) {
  return (num_experts + 2) / 2;
}
static_assert(int64_t{kMaxRanks} * CountPairs(kMaxExperts) * int64_t{sizeof(CountPacket)} <=
              kEagerRowBytes);

// A piece of a token's row, of one rank or to one.
struct SegmentItem {
  int32_t peer;  // one of those that the numbers go round
  int32_t piece;
  int32_t token;
};

// How rows are cut into pieces, a warp's work each. Numbers of such parts go round the peers first,
// so that all links carry data at once, then through a row.
class RowSegments {
 public:
  RowSegments() = default;
  RowSegments(int32_t count, int32_t chunks)
      : count_(count), chunks_(chunks), by_count_(Max(count, 1)) {}

  JAX_EP_HOST_DEVICE int32_t count() const { return count_; }  // of a row; 0: the call is not small
  JAX_EP_HOST_DEVICE int32_t FirstOf(int32_t piece) const { return piece * chunks_; }
  JAX_EP_HOST_DEVICE int32_t EndOf(int32_t piece, int32_t row_vectors) const {
    return Min((piece + 1) * chunks_, row_vectors);
  }
  JAX_EP_HOST_DEVICE SegmentItem At(int32_t number, const FastDivmod& by_num_peers) const {
    const int32_t pieces = by_num_peers.Quotient(number);
    return {by_num_peers.Remainder(number), by_count_.Remainder(pieces),
            by_count_.Quotient(pieces)};
  }

 private:
  int32_t count_ = 0;
  int32_t chunks_ = 0;  // of 16 bytes, of a piece
  FastDivmod by_count_;
};

// Some thousands of pieces if the rows are long enough, about two for each warp of a large GPU;
// none longer than kMaxSegmentVectors, since there are at most that many chunks for each piece
// wanted. None if the call is not small, by static shapes alone, as all ranks have to agree.
inline RowSegments PlanRowSegments(int64_t num_ranks, int64_t num_tokens, int64_t top_k,
                                   int64_t row_vectors) {
  constexpr int64_t kWanted = 4096;
  static_assert(kEagerRowBytes / 16 <= kWanted * kMaxSegmentVectors);
  constexpr int64_t kLeastChunks = 64;
  const int64_t rows = num_ranks * num_tokens;
  if (rows <= 0 || row_vectors <= 0 || top_k > kMaxLowLatencyTopK ||
      rows > kMaxLowLatencySegments || rows * top_k > kMaxLowLatencyAssignments ||
      rows * row_vectors * 16 > kEagerRowBytes) {
    return {};
  }
  const int64_t wanted = CeilDivide(row_vectors, CeilDivide(kWanted, rows));
  const int64_t chunks = Max(wanted, Min(row_vectors, kLeastChunks));
  return {static_cast<int32_t>(CeilDivide(row_vectors, chunks)), static_cast<int32_t>(chunks)};
}

// Of a block's warps those that count choices, while the others push.
inline constexpr int kCountingWarps = 8;

// How a rank's choices are cut into stretches, each for a warp to count.
struct AssignmentRanges {
  int32_t count;
  int32_t log2_assignments;  // of each, at least 32
};

inline AssignmentRanges PlanAssignmentRanges(int64_t num_ranks, int64_t num_assignments) {
  const auto ranks = static_cast<int32_t>(num_ranks);
  AssignmentRanges stretches = {Max(kCountingWarps / ranks, 1), 5};
  while (int64_t{stretches.count} << stretches.log2_assignments < num_assignments) {
    ++stretches.log2_assignments;
  }
  return stretches;
}

// Words of shared memory, that a block of a dispatch needs for what it works out (quotas.cuh).
constexpr int64_t QuotaWords(int64_t num_ranks, int64_t num_experts) {
  return 3 * num_experts + 3 * (num_experts / num_ranks) + 5;
}

// Of shared memory, that a block needs for the plan of a small dispatch (small_plan.cuh).
inline int64_t BlockPlanBytes(int64_t num_ranks, int64_t num_assignments, int64_t num_experts) {
  const int64_t stretches = PlanAssignmentRanges(num_ranks, num_assignments).count;
  const int64_t bins = num_ranks * (stretches + 1) * (num_experts + 1);
  return 8 * num_ranks * num_assignments + 4 * (bins + QuotaWords(num_ranks, num_experts));
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_LOW_LATENCY_LAYOUT_H_
