// The token chunks of a dispatch, and the receive rings for them. They follow from static shapes
// alone, because all ranks have to agree.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_TOKEN_CHUNKS_H_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_TOKEN_CHUNKS_H_

#include "ffi/device/protocol/control_block.h"

namespace jax_ep {

struct TokenChunks {
  int32_t tokens;      // per chunk: signaled together
  int32_t num_chunks;  // per rank
  // A receiver has one ring per sender. Chunk c reuses the slots of chunk c - ring_chunks, once the
  // receivers have expanded that chunk and returned its credit.
  int32_t ring_chunks;
  int32_t ring_slots;  // a slot holds one token
};

// Chunks of more than 1 MB reduce the time spent waiting. But nothing else is left to do while the
// last chunk is expanded, so there are at least 16. The rings of all senders hold as many rows as a
// combine of these tokens needs in the same buffer, or 128 MiB: senders seldom wait then, as the
// first credits take 60 us to return and some chunks are always in flight. `max_ring_chunks` bounds
// each ring; 0: it does not.
constexpr TokenChunks PlanTokenChunks(int64_t num_tokens, int64_t row_bytes, int64_t num_ranks,
                                      int64_t top_k, int64_t max_ring_chunks = 0) {
  constexpr int64_t kChunkBytes = int64_t{7} << 18;  // 1.75 MB
  constexpr int64_t kMinChunks = 16;
  constexpr int64_t kMinRingBytes = int64_t{128} << 20;  // all senders' rings
  constexpr int64_t kMinRingChunks = 4;
  const int64_t chunks_of_bytes = num_tokens / Max(kChunkBytes / row_bytes, 1);
  const int64_t chunks = Min(Max(chunks_of_bytes, kMinChunks), kMaxChunks);
  const int64_t tokens = Max(CeilDivide(num_tokens, chunks), 1);
  const int64_t num_chunks = CeilDivide(num_tokens, tokens);
  const int64_t rows = Max(num_tokens * Min(top_k, num_ranks), kMinRingBytes / row_bytes);
  const int64_t chunks_per_sender = Max(rows / Max(num_ranks - 1, 1) / tokens, kMinRingChunks);
  int64_t ring_chunks = Min(chunks_per_sender, num_chunks);
  if (max_ring_chunks > 0) ring_chunks = Min(ring_chunks, max_ring_chunks);
  const int64_t ring_slots = Min(ring_chunks * tokens, num_tokens);
  return {static_cast<int32_t>(tokens), static_cast<int32_t>(num_chunks),
          static_cast<int32_t>(ring_chunks), static_cast<int32_t>(ring_slots)};
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_TOKEN_CHUNKS_H_
