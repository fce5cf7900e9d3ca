// The counts that all ranks send (assignment_tile.cuh), read as they arrive.
#ifndef JAX_EP_DEVICE_TRANSFER_DISPATCH_INCOMING_COUNTS_CUH_
#define JAX_EP_DEVICE_TRANSFER_DISPATCH_INCOMING_COUNTS_CUH_

#include "ffi/device/transfer/dispatch/quotas.cuh"
#include "ffi/device/transfer/eager_buffers.cuh"

namespace jax_ep {

// Used by a thread group of a block; each thread collects a share of the pairs. A packet with the
// tag of this call is valid at once. All packets are there when one chunk of each peer has arrived.
class IncomingCounts {
 public:
  template <typename Eager>
  __device__ IncomingCounts(const CallParams& call, const Eager& eager, const ThreadGroup& threads)
      : call_(call),
        tag_(eager.tag()),
        num_pairs_(CountPairs(call.num_experts)),
        packets_(eager.Local().counts()),
        num_threads_(static_cast<int>(threads.size)),
        next_pair_(static_cast<int>(threads.index)) {}

  // Passes this thread's remaining share to `quotas`, or what arrives of it within kPolls polls.
  __device__ void Collect(Quotas* quotas) {
#pragma unroll 1
    for (int polls = kPolls; next_pair_ < num_pairs_; next_pair_ += num_threads_) {
#pragma unroll 1
      while (!TryCollect(next_pair_, quotas)) {
        if (--polls == 0) return;
      }
    }
  }

  // Whether Collect has passed all of this thread's share.
  __device__ bool IsComplete() const { return next_pair_ >= num_pairs_; }

  // Called by one warp. Returns the lowest rank whose counts are missing in the next pair of a
  // lane.
  __device__ uint32_t MissingSource() const {
    uint32_t missing = kMaxRanks;
#pragma unroll 1
    for (int source = 0; !IsComplete() && source < call_.num_ranks; ++source) {
      uint64_t counts;
      uint64_t tag;
      Load(source, next_pair_, &counts, &tag);
      if (tag != tag_) missing = min(missing, static_cast<uint32_t>(source));
    }
    return min(__reduce_min_sync(kFullWarp, missing), static_cast<uint32_t>(kMaxRanks - 1));
  }

  // Returns a count, once all are there.
  __device__ int32_t Count(int source, int bin) const {
    uint64_t counts;
    uint64_t tag;
    Load(source, bin / 2, &counts, &tag);
    return Unpack(counts, bin % 2);
  }

 private:
  static constexpr int kPolls = 64;
  static constexpr int kSourcesInFlight = 4;

  __device__ void Load(int source, int pair, uint64_t* counts, uint64_t* tag) const {
    *counts = 0;
    *tag = tag_;
    // A call without tokens has no chunks either, which would show that the counts have arrived.
    if (call_.num_tokens == 0) return;
    LoadRelaxedSystem(&packets_[source * num_pairs_ + pair], counts, tag);
  }

  // Counts of peers are checked like every index.
  __device__ int32_t Unpack(uint64_t counts, int which) const {
    const auto count = static_cast<int32_t>(which == 0 ? counts : counts >> 32);
    return max(0, min(count, call_.num_assignments()));
  }

  // Collects one pair of bins of all ranks, or returns false.
  __device__ bool TryCollect(int pair, Quotas* quotas) {
    int32_t demands[2] = {0, 0};
#pragma unroll 1
    for (int first = 0; first < call_.num_ranks; first += kSourcesInFlight) {
      uint64_t counts[kSourcesInFlight];
      bool has_arrived = true;
#pragma unroll
      for (int j = 0; j < kSourcesInFlight; ++j) {
        uint64_t tag;
        if (first + j >= call_.num_ranks) continue;
        Load(first + j, pair, &counts[j], &tag);
        has_arrived &= tag == tag_;
      }
      if (!has_arrived) return false;
#pragma unroll
      for (int j = 0; j < kSourcesInFlight; ++j) {
        if (first + j >= call_.num_ranks) continue;
        for (int which = 0; which < 2; ++which) {
          const int bin = 2 * pair + which;
          const int32_t count = Unpack(counts[j], which);
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

  const CallParams& call_;
  const uint64_t tag_;
  const int num_pairs_;
  const CountPacket* const packets_;  // [R][pairs]
  const int num_threads_;
  int next_pair_;  // this thread's
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_DISPATCH_INCOMING_COUNTS_CUH_
