// Messages of token chunks that all warps of the grid pack, segment by segment.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_PACKING_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_PACKING_CUH_

#include "ffi/device/transfer/hierarchical/chunks.cuh"
#include "ffi/device/transfer/hierarchical/low_latency/waits.cuh"

namespace jax_ep {

// The segments that a warp has packed. Who counts a message's last one puts the message. Counts are
// delayed for some segments, because a release waits for all earlier stores, and the stores of the
// next segments should not wait for that.
class PackedSegments {
 public:
  // Rows begin at `rows_offset` of a message.
  __device__ PackedSegments(const CallParams& call, const HierarchicalLayout& layout,
                            const HierarchicalSegments& sizes, int64_t rows_offset)
      : call_(call), layout_(layout), sizes_(sizes), rows_offset_(rows_offset) {}

  // Adds a segment of a token of a chunk, which is stored, unless the token is not in the message.
  __device__ void Add(int rail, int chunk, uint64_t tokens) {
    if (LaneIndex() == count_) {
      rail_ = rail;
      chunk_ = chunk;
      tokens_ = tokens;
    }
    if (++count_ == 32) Count();
  }

  __device__ void Count() {
    if (count_ == 0) return;
    __syncwarp();  // all lanes' stores come before each lane's count
    if (LaneIndex() < count_) {
      // The counters are zero between calls. Release: the stores. Acquire: the other warps'.
      uint32_t* const finished = &call_.control->progress.chunk_items_finished[rail_][chunk_];
      const int total = layout_.ChunkTokens(chunk_, call_.num_tokens) * sizes_.segments.count();
      if (AddAcquireReleaseDevice(finished, 1) + 1 == static_cast<uint32_t>(total)) Put();
    }
    count_ = 0;
  }

 private:
  // Called by one lane, for its message. EAGER_SIGNAL_MESSAGE
  __device__ void Put() const {
    const Rail rail(call_, layout_, rail_);
    const int message = HierarchicalSegments::MessageOf(chunk_);
    const int64_t row_bytes = int64_t{call_.wire_vectors} * sizeof(uint4);
    PackHeader(call_, rail, message, rows_offset_ + __popcll(tokens_) * row_bytes, tokens_, false);
    rail.Put(message);
  }

  const CallParams& call_;
  const HierarchicalLayout& layout_;
  const HierarchicalSegments& sizes_;
  const int64_t rows_offset_;
  int count_ = 0;
  // Each lane holds one segment's.
  int rail_;
  int chunk_;
  uint64_t tokens_;
};

// A token's row in a message that has arrived.
struct ReceivedRow {
  bool is_there;
  const uint8_t* message;
  int row;

  __device__ ReceivedRow(const HierarchicalSegments& sizes, const Rail& rail, int token) {
    const int number = HierarchicalSegments::MessageOf(sizes.Chunk(token));
    const uint64_t tokens = LoadRelaxedSystem(&rail.Header(number).tokens);
    const int index = sizes.IndexInChunk(token);
    is_there = IsIn(tokens, index);
    row = RowIn(tokens, index);
    message = rail.Received(number);
  }

  __device__ const uint4* Vectors(const CallParams& call, int64_t rows_offset) const {
    return reinterpret_cast<const uint4*>(message + rows_offset) + int64_t{row} * call.wire_vectors;
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_PACKING_CUH_
