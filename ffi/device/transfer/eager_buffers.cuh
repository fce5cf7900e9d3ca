// Addresses of the eager buffers (eager_layout.h) that the running call uses.
#ifndef JAX_EP_DEVICE_TRANSFER_EAGER_BUFFERS_CUH_
#define JAX_EP_DEVICE_TRANSFER_EAGER_BUFFERS_CUH_

#include "ffi/device/protocol/peer_stores.cuh"
#include "ffi/device/transfer/eager_layout.h"

namespace jax_ep {

// The eager buffers of all ranks, and the tag of everything that the call stores there. The tag is
// a 64-bit hash of the call and its sequence number, so no earlier contents carry it.
//
// This rank's members of the control block are loaded once: loads after an acquire would miss L1.
class EagerBuffers {
 public:
  // The buffers of one rank: Pointer<T> is T* for this rank, which reads them, and PeerPointer<T>
  // for any rank that is sent to.
  template <template <typename> class Pointer>
  class RankBuffers {
   public:
    __device__ RankBuffers(const CallParams& call, unsigned char* workspace, int64_t parity)
        : call_(call), workspace_(workspace), parity_(parity) {}

    __device__ Pointer<uint4> rows() const { return Buffer<uint4>(kEagerRows, kEagerRowBytes); }
    // [R][CountPairs]: the counts of each rank. They share the buffer of the rows.
    __device__ Pointer<CountPacket> counts() const {
      return Buffer<CountPacket>(kEagerRows, kEagerRowBytes);
    }
    __device__ Pointer<AssignmentPacket> packets() const {
      return Buffer<AssignmentPacket>(kEagerPackets, kPacketBytes);
    }
    // The scalars of a combine share the buffer of the packets.
    __device__ Pointer<float> scalars() const { return Buffer<float>(kEagerPackets, kPacketBytes); }
    __device__ Pointer<uint64_t> flags() const {
      return Buffer<uint64_t>(kEagerFlags, kMaxLowLatencySegments * int64_t{sizeof(uint64_t)});
    }

   private:
    static constexpr int64_t kPacketBytes =
        kMaxLowLatencyAssignments * int64_t{sizeof(AssignmentPacket)};

    template <typename T>
    __device__ Pointer<T> Buffer(WorkspaceBufferId buffer, int64_t bytes) const {
      return Pointer<T>(
          reinterpret_cast<T*>(workspace_ + call_.buffer_offsets[buffer] + parity_ * bytes));
    }

    const CallParams& call_;
    unsigned char* const workspace_;
    const int64_t parity_;
  };

  template <typename T>
  using LocalPointer = T*;
  using LocalBuffers = RankBuffers<LocalPointer>;

  __device__ EagerBuffers(const CallParams& call, uint64_t sequence)
      : call_(call),
        parity_(sequence % 2),
        tag_(Hash(call.fingerprint ^ Hash(sequence))),
        rank_(call.control->rank),
        workspace_(call.control->workspace) {}

  __device__ uint64_t tag() const { return tag_; }
  __device__ int rank() const { return rank_; }
  __device__ LocalBuffers Local() const { return {call_, workspace_, parity_}; }
  __device__ RankBuffers<PeerPointer> At(int rank) const {
    return {call_, call_.control->peers[rank].workspace, parity_};
  }

 private:
  __device__ static uint64_t Hash(uint64_t value) {
    value = (value ^ (value >> 31)) * 0xbf58476d1ce4e5b9ull;
    return (value ^ (value >> 29)) * 0x94d049bb133111ebull;
  }

  const CallParams& call_;
  const int64_t parity_;
  const uint64_t tag_;
  const int rank_;
  unsigned char* const workspace_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_EAGER_BUFFERS_CUH_
