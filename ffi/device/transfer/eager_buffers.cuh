// Addresses of the eager buffers (eager_layout.h) that the running call uses.
#ifndef JAX_EP_DEVICE_TRANSFER_EAGER_BUFFERS_CUH_
#define JAX_EP_DEVICE_TRANSFER_EAGER_BUFFERS_CUH_

#include "ffi/device/protocol/peer_stores.cuh"
#include "ffi/device/transfer/eager_layout.h"

namespace jax_ep {

// Where the eager buffers of a group are in each rank's workspace: offsets of one of the two.
class GroupEagerLayout {
 public:
  __device__ explicit GroupEagerLayout(const CallParams& call) : call_(call) {}

  __device__ int64_t rows(int64_t parity) const {
    return call_.buffer_offsets[kEagerRows] + parity * kEagerRowBytes;
  }
  // [R][CountPairs]: the counts of each rank. They share the buffer of the rows.
  __device__ int64_t counts(int64_t parity) const { return rows(parity); }
  __device__ int64_t packets(int64_t parity) const {
    return call_.buffer_offsets[kEagerPackets] +
           parity * (kMaxLowLatencyAssignments * int64_t{sizeof(AssignmentPacket)});
  }
  __device__ int64_t flags(int64_t parity) const {
    return call_.buffer_offsets[kEagerFlags] +
           parity * (kMaxLowLatencySegments * int64_t{sizeof(uint64_t)});
  }

 private:
  const CallParams& call_;
};

// The eager buffers of all ranks, and the tag of everything that the call stores there. The tag is
// a 64-bit hash of the call and its sequence number, so no earlier contents carry it.
//
// This rank's members of the control block are loaded once: loads after an acquire would miss L1.
template <typename Layout>
class EagerBuffersOf {
 public:
  // The buffers of one rank: Pointer<T> is T* for this rank, which reads them, and PeerPointer<T>
  // for any rank that is sent to.
  template <template <typename> class Pointer>
  class RankBuffers {
   public:
    __device__ RankBuffers(const Layout& layout, unsigned char* workspace, int64_t parity)
        : layout_(layout), workspace_(workspace), parity_(parity) {}

    __device__ Pointer<uint4> rows() const { return At<uint4>(layout_.rows(parity_)); }
    __device__ Pointer<CountPacket> counts() const {
      return At<CountPacket>(layout_.counts(parity_));
    }
    __device__ Pointer<AssignmentPacket> packets() const {
      return At<AssignmentPacket>(layout_.packets(parity_));
    }
    // The scalars of a combine share the buffer of the packets.
    __device__ Pointer<float> scalars() const { return At<float>(layout_.packets(parity_)); }
    __device__ Pointer<uint64_t> flags() const { return At<uint64_t>(layout_.flags(parity_)); }

   private:
    template <typename T>
    __device__ Pointer<T> At(int64_t offset) const {
      return Pointer<T>(reinterpret_cast<T*>(workspace_ + offset));
    }

    const Layout layout_;
    unsigned char* const workspace_;
    const int64_t parity_;
  };

  template <typename T>
  using LocalPointer = T*;
  using LocalBuffers = RankBuffers<LocalPointer>;

  __device__ EagerBuffersOf(const CallParams& call, uint64_t sequence, const Layout& layout)
      : call_(call),
        layout_(layout),
        parity_(sequence % 2),
        tag_(Hash(call.fingerprint ^ Hash(sequence))),
        rank_(call.control->rank),
        workspace_(call.control->workspace) {}
  __device__ EagerBuffersOf(const CallParams& call, uint64_t sequence)
      : EagerBuffersOf(call, sequence, Layout(call)) {}

  __device__ uint64_t tag() const { return tag_; }
  __device__ int rank() const { return rank_; }
  __device__ LocalBuffers Local() const { return {layout_, workspace_, parity_}; }
  __device__ RankBuffers<PeerPointer> At(int rank) const {
    return {layout_, call_.control->peers[rank].workspace, parity_};
  }

 private:
  __device__ static uint64_t Hash(uint64_t value) {
    value = (value ^ (value >> 31)) * 0xbf58476d1ce4e5b9ull;
    return (value ^ (value >> 29)) * 0x94d049bb133111ebull;
  }

  const CallParams& call_;
  const Layout layout_;
  const int64_t parity_;
  const uint64_t tag_;
  const int rank_;
  unsigned char* const workspace_;
};

using EagerBuffers = EagerBuffersOf<GroupEagerLayout>;

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_EAGER_BUFFERS_CUH_
