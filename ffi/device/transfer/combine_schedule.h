// In which order combine sends and adds up: chunk by chunk of the ranks' tokens.
//
//   step 0       send chunk 0 of all ranks' tokens
//   ...
//   step lag     send chunk lag, add up chunk 0 of this rank's
//   ...
//   step chunks  add up chunk chunks - lag
//   ...
//
// A warp that adds up a chunk waits for those that send it, here and on the peers. These are in an
// earlier step, and wait for earlier steps only: there is progress in any order of launches, with
// any number of warps.
#ifndef JAX_EP_DEVICE_TRANSFER_COMBINE_SCHEDULE_H_
#define JAX_EP_DEVICE_TRANSFER_COMBINE_SCHEDULE_H_

#include "ffi/device/common/integers.h"

namespace jax_ep {

// Chunks [first, end) of the row of one of a rank's tokens.
struct CombineItem {
  bool is_sum;  // to be added up, of this rank; else to be sent
  int32_t chunk;
  int32_t rank;
  int32_t token;  // -1: there is nothing to do
  int32_t first;
  int32_t end;
};

class CombineSchedule {
 public:
  CombineSchedule() = default;
  JAX_EP_HOST_DEVICE CombineSchedule(int32_t num_tokens, int32_t num_ranks, int32_t row_vectors,
                                     int32_t most_chunks, int32_t num_warps)
      : num_tokens_(num_tokens),
        num_ranks_(num_ranks),
        row_chunks_(row_vectors),
        tokens_of_chunk_(CeilDivide(num_tokens, most_chunks)),
        num_chunks_(num_tokens == 0 ? 0 : CeilDivide(num_tokens, tokens_of_chunk_)) {
    const int64_t shared_by_all = int64_t{num_tokens} * num_ranks * row_vectors / kItemsInFlight;
    const int64_t units = CeilDivide(shared_by_all, kPieceUnit);
    send_pieces_ = Pieces(Max(units, 1) * kPieceUnit, row_vectors);
    // Where warps are few, sums are many anyway: 649 us with whole rows, 814 with small pieces.
    const int64_t cuts = num_tokens == 0 ? 0 : int64_t{kSumsOfWarp} * num_warps / num_tokens;
    const int64_t sum = CeilDivide(row_vectors / Max(cuts, 1), kPieceUnit);
    sum_pieces_ = Pieces(Max(sum, 2) * kPieceUnit, row_vectors);
    if (send_pieces_.size < sum_pieces_.size) sum_pieces_ = send_pieces_;
    const int32_t lag = num_chunks_ == 0 ? 0 : CeilDivide(kItemsAhead, SendsOfStep());
    lag_ = Min(lag, num_chunks_);
  }

  JAX_EP_HOST_DEVICE int32_t num_chunks() const { return num_chunks_; }

  // In the last chunk some have nothing to do.
  JAX_EP_HOST_DEVICE int32_t Count() const { return num_chunks_ * (SendsOfStep() + SumsOfStep()); }

  // Tickets that send a chunk of a rank's tokens.
  JAX_EP_HOST_DEVICE int32_t TicketsOf(int32_t chunk) const {
    const int32_t left = num_tokens_ - chunk * tokens_of_chunk_;
    return Min(left, tokens_of_chunk_) * send_pieces_.count;
  }

  // `rank` is this one.
  JAX_EP_HOST_DEVICE CombineItem At(int32_t number, int32_t rank) const {
    const int32_t sends = SendsOfStep();
    const int32_t sums = SumsOfStep();
    if (number < lag_ * sends) return Send(number / sends, number % sends, rank);
    number -= lag_ * sends;
    const int32_t step = number / (sends + sums);
    if (step >= num_chunks_ - lag_) {
      number -= (num_chunks_ - lag_) * (sends + sums);
      return Sum(num_chunks_ - lag_ + number / sums, number % sums, rank);
    }
    const int32_t within = number % (sends + sums);
    return within < sends ? Send(lag_ + step, within, rank) : Sum(step, within - sends, rank);
  }

 private:
  // Tickets from those that send a chunk to those that add it up: more than warps hold at once, or
  // these wait for each other instead of filling the links (177 to 166 us at H = 4096, K = 2).
  static constexpr int32_t kItemsAhead = 6144;
  // What a warp does at once, and how many of a GPU do something at once: a few tokens' rows are
  // cut into pieces for all of them.
  static constexpr int32_t kPieceUnit = 64;
  static constexpr int32_t kItemsInFlight = 4096;
  // The last sums come when there is nothing else to do: small ones, for many warps (506 to 490 us
  // at T = 4096, H = 7168 on 4 H200).
  static constexpr int32_t kSumsOfWarp = 6;

  // How rows are cut.
  struct Pieces {
    int32_t size;  // in chunks of 16 bytes
    int32_t count;

    Pieces() = default;
    JAX_EP_HOST_DEVICE Pieces(int64_t wanted, int32_t row_vectors)
        : size(static_cast<int32_t>(Min(wanted, row_vectors))),
          count(size == 0 ? 1 : CeilDivide(row_vectors, size)) {}
  };

  JAX_EP_HOST_DEVICE int32_t SendsOfStep() const {
    return tokens_of_chunk_ * send_pieces_.count * num_ranks_;
  }
  JAX_EP_HOST_DEVICE int32_t SumsOfStep() const { return tokens_of_chunk_ * sum_pieces_.count; }

  // The first peer is the next rank, so that all links carry data at once.
  JAX_EP_HOST_DEVICE CombineItem Send(int32_t chunk, int32_t within, int32_t rank) const {
    return Of(false, chunk, within / num_ranks_, (within + rank + 1) % num_ranks_, send_pieces_);
  }

  JAX_EP_HOST_DEVICE CombineItem Sum(int32_t chunk, int32_t within, int32_t rank) const {
    return Of(true, chunk, within, rank, sum_pieces_);
  }

  JAX_EP_HOST_DEVICE CombineItem Of(bool is_sum, int32_t chunk, int32_t within, int32_t rank,
                                    const Pieces& pieces) const {
    const int32_t token = chunk * tokens_of_chunk_ + within / pieces.count;
    const int32_t first = within % pieces.count * pieces.size;
    const int32_t end = first + pieces.size;
    return {is_sum, chunk, rank, token < num_tokens_ ? token : -1, first, Min(end, row_chunks_)};
  }

  int32_t num_tokens_;
  int32_t num_ranks_;
  int32_t row_chunks_;
  int32_t tokens_of_chunk_;
  int32_t num_chunks_;
  Pieces send_pieces_;
  Pieces sum_pieces_;
  int32_t lag_;  // steps from sending to adding up
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_COMBINE_SCHEDULE_H_
