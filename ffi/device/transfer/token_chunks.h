// How a rank's tokens are cut into chunks in both dispatches, and for how many of them the others
// have places. By static shapes alone: all ranks have to agree.
#ifndef JAX_EP_DEVICE_TRANSFER_TOKEN_CHUNKS_H_
#define JAX_EP_DEVICE_TRANSFER_TOKEN_CHUNKS_H_

#include "ffi/device/protocol/control_block.h"

namespace jax_ep {

struct TokenChunks {
  int32_t tokens;      // of a chunk, that peers hear of at once
  int32_t num_chunks;  // of a rank
  // The window: chunks that each receiver has places for, of each sender, and their tokens. Those
  // that follow take the places of what has been brought from there.
  int32_t ring_chunks;
  int32_t window;
};

// Chunks of more than a MB take less waiting, but the last one's tokens are brought when nothing
// else is left to do. The windows of all senders are as many rows as a combine of these tokens
// needs there, or 128 MiB, so that senders seldom wait: it takes 60 us until the first tokens have
// been brought, and some chunks are always on their way. At most `most_window` chunks of each.
constexpr TokenChunks PlanTokenChunks(int64_t num_tokens, int64_t row_bytes, int64_t num_ranks,
                                      int64_t top_k, int64_t most_window = kMaxChunks) {
  constexpr int64_t kBytesOfChunk = int64_t{7} << 18;  // 1.75 MB
  constexpr int64_t kFewestChunks = 16;
  constexpr int64_t kWindowBytes = int64_t{128} << 20;  // of all senders
  constexpr int64_t kFewestWindow = 4;
  const int64_t by_bytes = num_tokens / Max(kBytesOfChunk / row_bytes, 1);
  const int64_t chunks = Min(Max(by_bytes, kFewestChunks), kMaxChunks);
  const int64_t tokens = Max(CeilDivide(num_tokens, chunks), 1);
  const int64_t num_chunks = CeilDivide(num_tokens, tokens);
  const int64_t rows = Max(num_tokens * Min(top_k, num_ranks), kWindowBytes / row_bytes);
  const int64_t of_sender = Max(rows / Max(num_ranks - 1, 1) / tokens, kFewestWindow);
  const int64_t ring_chunks = Min(Min(of_sender, Max(most_window, 1)), num_chunks);
  const int64_t window = Min(ring_chunks * tokens, num_tokens);
  return {static_cast<int32_t>(tokens), static_cast<int32_t>(num_chunks),
          static_cast<int32_t>(ring_chunks), static_cast<int32_t>(window)};
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_TOKEN_CHUNKS_H_
