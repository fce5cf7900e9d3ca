// The order in which combine sends partial sums and reduces them: by token chunks of the ranks.
//
//   step 0              send chunk 0 of all ranks' tokens
//   ...
//   step lag            send chunk lag, reduce chunk 0 of this rank's tokens
//   ...
//   step num_chunks     reduce chunk num_chunks - lag
//   ...
//
// A warp that reduces a chunk waits for the warps that send it, here and on the peers. Those have
// items of an earlier step, and wait for earlier steps only. So a combine makes progress with any
// number of warps, whatever the order in which ranks launch.
#ifndef JAX_EP_DEVICE_TRANSFER_COMBINE_SCHEDULE_H_
#define JAX_EP_DEVICE_TRANSFER_COMBINE_SCHEDULE_H_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Vectors [first, end) of the row of one of a rank's tokens.
struct CombineItem {
  bool is_reduce;  // reduce on this rank, else send to `rank`
  int32_t chunk;
  int32_t rank;   // the token's rank
  int32_t token;  // -1: nothing to do
  int32_t first;
  int32_t end;
};

class CombineSchedule {
 public:
  CombineSchedule() = default;
  JAX_EP_HOST_DEVICE CombineSchedule(int32_t num_tokens, int32_t num_ranks, int32_t row_vectors,
                                     int32_t max_chunks, int32_t num_warps)
      : num_tokens_(num_tokens),
        num_ranks_(num_ranks),
        row_vectors_(row_vectors),
        chunk_tokens_(CeilDivide(num_tokens, max_chunks)),
        num_chunks_(num_tokens == 0 ? 0 : CeilDivide(num_tokens, chunk_tokens_)) {
    const int64_t vectors_per_item = int64_t{num_tokens} * num_ranks * row_vectors / kItemsInFlight;
    const int64_t units = CeilDivide(vectors_per_item, kSegmentUnit);
    send_segments_ = Segments(Max(units, 1) * kSegmentUnit, row_vectors);
    // Few warps have many reductions each anyway: 649 us with whole rows, 814 with small segments.
    const int64_t cuts = num_tokens == 0 ? 0 : int64_t{kReducesPerWarp} * num_warps / num_tokens;
    const int64_t reduce_units = CeilDivide(row_vectors / Max(cuts, 1), kSegmentUnit);
    reduce_segments_ = Segments(Max(reduce_units, 2) * kSegmentUnit, row_vectors);
    if (send_segments_.vectors < reduce_segments_.vectors) reduce_segments_ = send_segments_;
    const int32_t lag = num_chunks_ == 0 ? 0 : CeilDivide(kItemsAhead, SendsPerStep());
    lag_ = Min(lag, num_chunks_);
  }

  JAX_EP_HOST_DEVICE int32_t num_chunks() const { return num_chunks_; }

  // Some items of the last chunk have nothing to do.
  JAX_EP_HOST_DEVICE int32_t num_items() const {
    return num_chunks_ * (SendsPerStep() + ReducesPerStep());
  }

  // Returns the number of items that send a chunk of one rank's tokens.
  JAX_EP_HOST_DEVICE int32_t NumSends(int32_t chunk) const {
    const int32_t tokens_left = num_tokens_ - chunk * chunk_tokens_;
    return Min(tokens_left, chunk_tokens_) * send_segments_.count;
  }

  // Returns the item of a ticket on this `rank`.
  JAX_EP_HOST_DEVICE CombineItem Item(int32_t ticket, int32_t rank) const {
    const int32_t sends = SendsPerStep();
    const int32_t reduces = ReducesPerStep();
    if (ticket < lag_ * sends) return Send(ticket / sends, ticket % sends, rank);
    ticket -= lag_ * sends;
    const int32_t step = ticket / (sends + reduces);
    if (step >= num_chunks_ - lag_) {
      ticket -= (num_chunks_ - lag_) * (sends + reduces);
      return Reduce(num_chunks_ - lag_ + ticket / reduces, ticket % reduces, rank);
    }
    const int32_t index = ticket % (sends + reduces);
    return index < sends ? Send(lag_ + step, index, rank) : Reduce(step, index - sends, rank);
  }

 private:
  // Items between the sends and the reductions of a chunk. With fewer items than warps hold at
  // once, warps wait for each other instead of filling the links (177 to 166 us at H = 4096, K =
  // 2).
  static constexpr int32_t kItemsAhead = 6144;
  // A warp processes kSegmentUnit vectors at once, and a GPU has about kItemsInFlight items in
  // flight. Rows are cut into segments for all of them.
  static constexpr int32_t kSegmentUnit = 64;
  static constexpr int32_t kItemsInFlight = 4096;
  // Nothing else is left to do during the last reductions, so they are small and spread over many
  // warps (506 to 490 us at T = 4096, H = 7168 on 4 H200).
  static constexpr int32_t kReducesPerWarp = 6;

  // The segments of a row.
  struct Segments {
    int32_t vectors;  // per segment
    int32_t count;

    Segments() = default;
    JAX_EP_HOST_DEVICE Segments(int64_t wanted, int32_t row_vectors)
        : vectors(static_cast<int32_t>(Min(wanted, row_vectors))),
          count(vectors == 0 ? 1 : CeilDivide(row_vectors, vectors)) {}
  };

  JAX_EP_HOST_DEVICE int32_t SendsPerStep() const {
    return chunk_tokens_ * send_segments_.count * num_ranks_;
  }
  JAX_EP_HOST_DEVICE int32_t ReducesPerStep() const {
    return chunk_tokens_ * reduce_segments_.count;
  }

  // Each rank begins with the next rank, so that all links carry data at once.
  JAX_EP_HOST_DEVICE CombineItem Send(int32_t chunk, int32_t index, int32_t rank) const {
    return Segment(false, chunk, index / num_ranks_, (index + rank + 1) % num_ranks_,
                   send_segments_);
  }

  JAX_EP_HOST_DEVICE CombineItem Reduce(int32_t chunk, int32_t index, int32_t rank) const {
    return Segment(true, chunk, index, rank, reduce_segments_);
  }

  JAX_EP_HOST_DEVICE CombineItem Segment(bool is_reduce, int32_t chunk, int32_t index, int32_t rank,
                                         const Segments& segments) const {
    const int32_t token = chunk * chunk_tokens_ + index / segments.count;
    const int32_t first = index % segments.count * segments.vectors;
    const int32_t end = first + segments.vectors;
    return {
        is_reduce, chunk, rank, token < num_tokens_ ? token : -1, first, Min(end, row_vectors_)};
  }

  int32_t num_tokens_;
  int32_t num_ranks_;
  int32_t row_vectors_;
  int32_t chunk_tokens_;
  int32_t num_chunks_;
  Segments send_segments_;
  Segments reduce_segments_;
  int32_t lag_;  // steps from the sends to the reductions of a chunk
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_COMBINE_SCHEDULE_H_
