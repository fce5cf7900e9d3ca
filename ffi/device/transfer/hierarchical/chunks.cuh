// The tokens of a chunk, and those of them that are in a message: one per bit of a mask, packed.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_CHUNKS_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_CHUNKS_CUH_

#include "ffi/device/protocol/running_call.cuh"
#include "ffi/device/transfer/hierarchical/layout.h"

namespace jax_ep {

static_assert(kMaxChunkTokens <= 64, "a lane looks at two tokens of a chunk");

// Called by one warp. Returns the tokens of a chunk for which is_in(token), which lanes find out.
template <typename IsIn>
__device__ inline uint64_t TokensWhere(const CallParams& call, const HierarchicalLayout& layout,
                                       int chunk, IsIn is_in) {
  const int count = layout.ChunkTokens(chunk, call.num_tokens);
  uint64_t tokens = 0;
  for (int i = 0; i < 2; ++i) {
    const int index = LaneIndex() + 32 * i;
    const bool is_one = index < count && is_in(chunk * layout.chunk_tokens + index);
    tokens |= uint64_t{__ballot_sync(kFullWarp, is_one)} << (32 * i);
  }
  return tokens;
}

// Whether a token of a chunk is in a message, and its row there.
__device__ inline bool IsIn(uint64_t tokens, int index) { return (tokens >> index & 1) != 0; }
__device__ inline int RowIn(uint64_t tokens, int index) {
  return __popcll(tokens & ((uint64_t{1} << index) - 1));
}

// Called by each of `num_warps` warps. Calls use(index, token) for its tokens of a chunk.
template <typename Use>
__device__ inline void ForEachToken(const CallParams& call, const HierarchicalLayout& layout,
                                    int chunk, int warp, int num_warps, Use use) {
  const int count = layout.ChunkTokens(chunk, call.num_tokens);
#pragma unroll 1
  for (int index = warp; index < count; index += num_warps) {
    use(index, chunk * layout.chunk_tokens + index);
  }
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_CHUNKS_CUH_
