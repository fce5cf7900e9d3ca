// The parameters that all transfer kernels share: the control block, the sizes of the call, and the
// buffers of the workspace.
#ifndef JAX_EP_DEVICE_PROTOCOL_CALL_PARAMS_H_
#define JAX_EP_DEVICE_PROTOCOL_CALL_PARAMS_H_

#include "ffi/device/common/fast_divmod.h"
#include "ffi/device/protocol/control_block.h"

namespace jax_ep {

// The buffers of a workspace, in their order. R ranks, E experts, T tokens per rank, top-k K,
// P = CountPairs(E) pairs of experts. A receive ring has S slots per sender (token_chunks.h).
enum WorkspaceBufferId : int {
  // Eager buffers (eager_buffers.cuh), double-buffered: peers store before this rank has entered
  // the call. They come first and have the same size for all shapes, so no other buffer overlaps
  // them.
  kEagerRows,     // dispatch: rows[R][T], or CountPacket[R][P]; combine: rows[T][min(K, R)]
  kEagerPackets,  // dispatch: AssignmentPacket[R][T * K]; combine: float[T * K]
  kEagerFlags,    // dispatch: uint64_t[R][T][segments]; combine: uint64_t[T][segments][R]

  // Stored by peers that know that this rank has entered the call.
  kReceivedRows,       // dispatch: the receive rings rows[R - 1][S], the next rank's first;
                       // combine: partial sums rows[T][min(K, R)]
  kRoutes,             // Route[R][T * K], this rank's included
  kReceivedWeights,    // float[R][T * K] of the peers
  kAssignmentScalars,  // float[T * K]

  // Private to this rank.
  kTileCounts,      // int2[kMaxTiles][P]: assignments of each expert per tile
  kAssignmentRows,  // int32_t[R][T * K]: inverted row_source; may be stale (CheckRows)
  kNumBuffers
};

// The route of an assignment: its expert (-1 if unrouted), and its position among the assignments
// of its rank to that expert.
struct alignas(8) Route {
  int32_t expert;
  int32_t position;
};

struct CallParams {
  ControlBlock* control;
  uint64_t fingerprint;
  uint32_t claim_tag;
  Operation operation;

  // R * T * K and M are at most kMaxItems: tokens, assignments and rows are indexed by int. Offsets
  // in vectors or bytes need 64 bits.
  int32_t num_tokens;               // T
  int32_t top_k;                    // K
  int32_t num_experts;              // E
  int32_t num_local_experts;        // L = E / R
  FastDivmod local_experts_divmod;  // divides by L
  int32_t num_ranks;                // R
  int32_t num_rows;                 // M
  int32_t operand_vectors;          // 16-byte vectors per row of x or y, without scales
  int32_t wire_vectors;             // per row in the workspace: payload and scales
  int32_t result_vectors;           // per row of the result, without scales
  int32_t scale_bytes;              // per quantized row of an operand or a result, else 0
  int32_t num_partial_sums;         // min(K, R) per token
  int32_t num_prologue_items;       // work items before the exchange
  int32_t num_tiles;                // tiles of assignments
  int32_t tile_assignments;         // assignments per tile, a multiple of kTileAssignments
  uint32_t nan_word;                // NaN of the row dtype, repeated to 4 bytes

  uint64_t workspace_bytes;  // required by the offsets below
  int64_t buffer_offsets[kNumBuffers];

  // Words of a quantized row's scales (scale_words.cuh).
  int32_t num_scale_words;  // ceil(scale_bytes / 4)
  int32_t scale_one;        // one, repeated to 4 bytes
  int32_t scale_nan;

  JAX_EP_HOST_DEVICE int num_assignments() const { return num_tokens * top_k; }     // per rank
  JAX_EP_HOST_DEVICE int num_all_tokens() const { return num_ranks * num_tokens; }  // all ranks'

  // Returns (rank + distance) % num_ranks, for distances up to num_ranks.
  JAX_EP_HOST_DEVICE int RankAfter(int rank, int distance) const {
    const int sum = rank + distance;
    return sum < num_ranks ? sum : sum - num_ranks;
  }

  // Returns the rank that owns an expert.
  JAX_EP_HOST_DEVICE int RankOfExpert(int expert) const {
    return local_experts_divmod.Quotient(expert);
  }

#ifdef __CUDACC__
  // Returns a buffer in the workspace of this rank, which exists (HasWorkspace).
  template <typename T>
  __device__ T* LocalBuffer(WorkspaceBufferId buffer) const {
    return reinterpret_cast<T*>(control->workspace + buffer_offsets[buffer]);
  }
#endif
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_PROTOCOL_CALL_PARAMS_H_
