// Memory that peers write before they know whether I have entered the call: all of small calls, the
// counts of every dispatch. In halves, see small.h.
#ifndef JAX_EP_DEVICE_TRANSFER_EAGER_BUFFER_CUH_
#define JAX_EP_DEVICE_TRANSFER_EAGER_BUFFER_CUH_

#include "ffi/device/protocol/wait.cuh"
#include "ffi/device/transfer/low_latency/layout.h"

namespace jax_ep {

// The halves that a call uses, and the tag that is on all it stores there. What a half happens to
// hold has another: the tag is a hash of 64 bits of the call, its sequence and its generation.
//
// What the control block says of my own is loaded once: after each acquire it would be far again.
class EagerBuffers {
 public:
  // A half of a rank.
  class Half {
   public:
    __device__ Half(const Call& call, unsigned char* workspace, int64_t number)
        : call_(call), workspace_(workspace), number_(number) {}

    __device__ uint4* rows() const { return At<uint4>(kEagerRows, kEagerRowBytes); }
    __device__ AssignmentPacket* packets() const {
      return At<AssignmentPacket>(kEagerPackets,
                                  kMaxLowLatencyAssignments * int64_t{sizeof(AssignmentPacket)});
    }
    __device__ float* scalars() const { return reinterpret_cast<float*>(packets()); }
    // [R][pairs]: of each rank's choices.
    __device__ CountPacket* counts() const { return At<CountPacket>(kEagerRows, kEagerRowBytes); }
    __device__ uint64_t* flags() const {
      return At<uint64_t>(kEagerFlags, kMaxLowLatencySegments * int64_t{sizeof(uint64_t)});
    }

   private:
    template <typename T>
    __device__ T* At(Buffer buffer, int64_t bytes) const {
      return reinterpret_cast<T*>(workspace_ + call_.offsets[buffer] + number_ * bytes);
    }

    const Call& call_;
    unsigned char* const workspace_;
    const int64_t number_;
  };

  __device__ EagerBuffers(const Call& call, uint64_t sequence)
      : call_(call),
        half_(sequence % 2),
        tag_(Hash(CurrentFingerprint(call) ^ Hash(sequence))),
        rank_(call.control->rank),
        workspace_(call.control->peers[rank_].workspace) {}

  __device__ uint64_t tag() const { return tag_; }
  __device__ int rank() const { return rank_; }
  __device__ Half Mine() const { return {call_, workspace_, half_}; }
  __device__ Half Of(int peer) const {
    return {call_, call_.control->peers[peer].workspace, half_};
  }

 private:
  __device__ static uint64_t Hash(uint64_t value) {
    value = (value ^ (value >> 31)) * 0xbf58476d1ce4e5b9ull;
    return (value ^ (value >> 29)) * 0x94d049bb133111ebull;
  }

  const Call& call_;
  const int64_t half_;
  const uint64_t tag_;
  const int rank_;
  unsigned char* const workspace_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_EAGER_BUFFER_CUH_
