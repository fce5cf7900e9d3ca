// What the kernel of a call knows of it: its place in the protocol, its sizes, its memory.
#ifndef JAX_EP_DEVICE_PROTOCOL_CALL_H_
#define JAX_EP_DEVICE_PROTOCOL_CALL_H_

#include "ffi/device/common/fast_divmod.h"
#include "ffi/device/protocol/control_block.h"

namespace jax_ep {

// The buffers of a workspace, in their order. R ranks, E experts, T tokens a rank, K choices.
enum Buffer : int {
  // Written by peers without waiting (small.h), in halves by the sequence's parity. First, and as
  // large for all shapes: they never overlap another buffer.
  kEagerRows,     // rows[R][T] of dispatch, rows[T][min(K, R)] of combine; or CountPacket[R][pairs]
  kEagerPackets,  // AssignmentPacket[R][T * K] of dispatch, float32[T * K] of combine
  kEagerFlags,    // uint64[R][T][pieces] of dispatch, uint64[T][pieces][R] of combine
  // Written by peers.
  kReceivedRows,       // dispatch: rows[R - 1][window], tokens that visit me, the next rank's first
                       // (token_chunks.h);
                       // combine: rows[T][min(K, R)], one for each rank that a token visits
  kRoutes,             // Route[R][T * K] of all ranks, mine included
  kReceivedWeights,    // float32[R][T * K] of the others
  kAssignmentScalars,  // float32[T * K]
  // Mine alone.
  kTileCounts,      // int2[kMaxTiles][pairs]: of each tile of my choices, those of each bin
  kAssignmentRows,  // int32[R][T * K]: a guess; an entry holds if row_source of that row agrees
  kNumBuffers
};

// A routed choice: its expert or -1, and its position among its rank's choices of that expert.
struct alignas(8) Route {
  int32_t expert;
  int32_t position;
};

struct Call {
  ControlBlock* control;
  uint64_t fingerprint;
  Operation operation;

  // R * T * K and M are at most kMaxItems, so a choice, a row or a token is an int; what counts
  // chunks or bytes is not.
  int32_t num_tokens;        // T
  int32_t top_k;             // K
  int32_t num_experts;       // E
  int32_t num_local;         // E / R
  FastDivmod by_num_local;   // the rank that has an expert
  int32_t num_ranks;         // R
  int32_t num_rows;          // M
  int32_t row_vectors;       // 16-byte pieces of a row
  int32_t num_partial_sums;  // min(K, R)
  int32_t num_parts;         // of what precedes the exchange
  int32_t num_tiles;         // of choices: dispatch's parts, and a call by plan's with weights
  int32_t tile_assignments;  // of a tile of choices, a multiple of kTileAssignments
  uint32_t nan_word;         // NaN in the row dtype, repeated to 4 bytes

  uint64_t workspace_bytes;  // that the offsets below need
  int64_t offsets[kNumBuffers];

  JAX_EP_HOST_DEVICE int num_assignments() const { return num_tokens * top_k; }  // of one rank
  JAX_EP_HOST_DEVICE int num_all_tokens() const { return num_ranks * num_tokens; }

  // The rank that is `distance` further on, up to num_ranks.
  JAX_EP_HOST_DEVICE int RankAfter(int rank, int distance) const {
    const int sum = rank + distance;
    return sum < num_ranks ? sum : sum - num_ranks;
  }

#ifdef __CUDACC__
  // `rank` must be below num_ranks. There must be a workspace; and to store to a peer's, outside
  // the halves, the wait_point must have been passed.
  template <typename T>
  __device__ T* Of(int rank, Buffer buffer) const {
    return reinterpret_cast<T*>(control->peers[rank].workspace + offsets[buffer]);
  }
#endif
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_CALL_H_
