// In which order combine sends and adds up: chunk by chunk of the ranks' tokens.
//
//   step 0     send chunk 0 of all ranks' tokens
//   ...
//   step kLag  send chunk kLag, add up chunk 0 of this rank's
//   ...
//
// A warp that adds up a chunk waits for those that send it, here and on the peers. These are in an
// earlier step, and wait for earlier steps only: there is progress in any order of launches, with
// any number of warps.
#ifndef JAX_EP_DEVICE_COMBINE_TICKETS_H_
#define JAX_EP_DEVICE_COMBINE_TICKETS_H_

#include "ffi/device/integers.h"

namespace jax_ep {

// A piece of the row of one of a rank's tokens, or nothing.
struct CombineTicket {
  bool is_sum;  // to be added up, of this rank; else to be sent
  int32_t chunk;
  int32_t rank;
  int32_t token;  // -1: there is nothing to do
  int32_t piece;
};

class CombineTickets {
 public:
  CombineTickets() = default;
  JAX_EP_HOST_DEVICE CombineTickets(int32_t num_tokens, int32_t num_ranks, int32_t row_chunks,
                                    int32_t most_chunks)
      : num_tokens_(num_tokens),
        num_ranks_(num_ranks),
        row_chunks_(row_chunks),
        tokens_of_chunk_(CeilDivide(num_tokens, most_chunks)),
        num_chunks_(num_tokens == 0 ? 0 : CeilDivide(num_tokens, tokens_of_chunk_)) {
    const int64_t shared_by_all = int64_t{num_tokens} * num_ranks * row_chunks / kTicketsAtOnce;
    const int64_t units = (shared_by_all + kPieceUnit - 1) / kPieceUnit;
    const int64_t most = row_chunks < kPieceUnit ? kPieceUnit : row_chunks;
    const int64_t wanted = (units < 1 ? 1 : units) * kPieceUnit;
    piece_chunks_ = static_cast<int32_t>(wanted < most ? wanted : most);
    num_pieces_ = row_chunks == 0 ? 1 : CeilDivide(row_chunks, piece_chunks_);
  }

  JAX_EP_HOST_DEVICE int32_t num_chunks() const { return num_chunks_; }
  JAX_EP_HOST_DEVICE int32_t num_pieces() const { return num_pieces_; }

  // Some of them with nothing to do.
  JAX_EP_HOST_DEVICE int32_t Count() const {
    return num_chunks_ == 0 ? 0 : (num_chunks_ + kLag) * OfStep();
  }

  // Tickets that send a chunk of a rank's tokens.
  JAX_EP_HOST_DEVICE int32_t TicketsOf(int32_t chunk) const {
    const int32_t left = num_tokens_ - chunk * tokens_of_chunk_;
    return (left < tokens_of_chunk_ ? left : tokens_of_chunk_) * num_pieces_;
  }

  // `rank` is this one: the first of its peers is the next, so that all links carry data at once.
  JAX_EP_HOST_DEVICE CombineTicket At(int32_t number, int32_t rank) const {
    const int32_t step = number / OfStep();
    const int32_t within = number % OfStep();
    const int32_t sends = tokens_of_chunk_ * num_pieces_ * num_ranks_;
    if (within < sends)
      return Of(false, step, within / num_ranks_, (within + rank + 1) % num_ranks_);
    return Of(true, step - kLag, within - sends, rank);
  }

  // Where a piece begins and ends, in chunks of 16 bytes.
  JAX_EP_HOST_DEVICE int32_t FirstOf(int32_t piece) const { return piece * piece_chunks_; }
  JAX_EP_HOST_DEVICE int32_t EndOf(int32_t piece) const {
    const int32_t end = (piece + 1) * piece_chunks_;
    return end < row_chunks_ ? end : row_chunks_;
  }

 private:
  static constexpr int32_t kLag = 2;  // steps from sending to adding up
  // What a warp does at once, and how many of a GPU do something at once: a few tokens' rows are
  // cut into pieces for all of them.
  static constexpr int32_t kPieceUnit = 64;
  static constexpr int32_t kTicketsAtOnce = 4096;

  JAX_EP_HOST_DEVICE static int32_t CeilDivide(int32_t value, int32_t divisor) {
    return (value + divisor - 1) / divisor;
  }

  JAX_EP_HOST_DEVICE int32_t OfStep() const {
    return tokens_of_chunk_ * num_pieces_ * (num_ranks_ + 1);
  }

  JAX_EP_HOST_DEVICE CombineTicket Of(bool is_sum, int32_t chunk, int32_t within,
                                      int32_t rank) const {
    const int32_t token = chunk * tokens_of_chunk_ + within / num_pieces_;
    const bool is_there = 0 <= chunk && chunk < num_chunks_ && token < num_tokens_;
    return {is_sum, chunk, rank, is_there ? token : -1, within % num_pieces_};
  }

  int32_t num_tokens_;
  int32_t num_ranks_;
  int32_t row_chunks_;
  int32_t tokens_of_chunk_;
  int32_t num_chunks_;
  int32_t piece_chunks_;
  int32_t num_pieces_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_COMBINE_TICKETS_H_
