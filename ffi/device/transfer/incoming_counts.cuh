// All ranks' counts of choices, as they come (choices.cuh).
#ifndef JAX_EP_DEVICE_TRANSFER_INCOMING_COUNTS_CUH_
#define JAX_EP_DEVICE_TRANSFER_INCOMING_COUNTS_CUH_

#include "ffi/device/transfer/eager_buffer.cuh"
#include "ffi/device/transfer/quotas.cuh"

namespace jax_ep {

// By threads of a block. A packet with the tag of this call is right at once; and when a chunk of
// each peer's tokens has come, all are there.
class IncomingCounts {
 public:
  __device__ IncomingCounts(const Call& call, const EagerBuffers& halves,
                            const ThreadGroup& threads)
      : call_(call),
        tag_(halves.tag()),
        num_pairs_(CountPairs(call.num_experts)),
        packets_(halves.Mine().counts()),
        num_threads_(static_cast<int>(threads.count)),
        next_(static_cast<int>(threads.number)) {}

  // Gives this thread's share to `quotas`: all of it if all are there, or what comes in a few
  // looks.
  __device__ void Collect(Quotas* quotas) {
#pragma unroll 1
    for (int looks = kLooks; next_ < num_pairs_; next_ += num_threads_) {
#pragma unroll 1
      while (!TryPair(next_, quotas)) {
        if (--looks == 0) return;
      }
    }
  }

  // When all are there.
  __device__ int32_t Of(int source, int bin) const {
    uint64_t counts;
    uint64_t tag;
    Load(source, bin / 2, &counts, &tag);
    return Count(counts, bin % 2);
  }

 private:
  static constexpr int kLooks = 64;
  static constexpr int kAtOnce = 4;  // sources

  __device__ void Load(int source, int pair, uint64_t* counts, uint64_t* tag) const {
    *counts = 0;
    *tag = tag_;
    // Who has no tokens sends no chunk either, which would say that its counts have come.
    if (call_.num_tokens == 0) return;
    LoadRelaxedSystem(&packets_[source * num_pairs_ + pair], counts, tag);
  }

  // Checked like every index.
  __device__ int32_t Count(uint64_t counts, int which) const {
    const auto count = static_cast<int32_t>(which == 0 ? counts : counts >> 32);
    return max(0, min(count, call_.num_assignments()));
  }

  __device__ bool TryPair(int pair, Quotas* quotas) {
    int32_t demands[2] = {0, 0};
#pragma unroll 1
    for (int first = 0; first < call_.num_ranks; first += kAtOnce) {
      uint64_t counts[kAtOnce];
      bool is_there = true;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        uint64_t tag;
        if (first + j >= call_.num_ranks) continue;
        Load(first + j, pair, &counts[j], &tag);
        is_there &= tag == tag_;
      }
      if (!is_there) return false;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j >= call_.num_ranks) continue;
        for (int which = 0; which < 2; ++which) {
          const int bin = 2 * pair + which;
          const int32_t count = Count(counts[j], which);
          demands[which] += count;
          quotas->SetCount(first + j, bin, count);
        }
      }
    }
    for (int which = 0; which < 2; ++which) {
      const int expert = 2 * pair + which;
      if (expert < call_.num_experts) quotas->SetDemand(expert, demands[which]);
    }
    return true;
  }

  const Call& call_;
  const uint64_t tag_;
  const int num_pairs_;
  const CountPacket* const packets_;  // [R][pairs]
  const int num_threads_;
  int next_;  // of this thread's share
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_INCOMING_COUNTS_CUH_
