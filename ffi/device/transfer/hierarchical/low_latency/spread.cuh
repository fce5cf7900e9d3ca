// Stores what partners tell in their messages of metadata, as packets, to all ranks of the domain,
// this one included.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_SPREAD_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_SPREAD_CUH_

#include "ffi/device/transfer/hierarchical/low_latency/waits.cuh"

namespace jax_ep {

// Items of one warp, by rail: 32 pairs of counts, then 32 assignments.
class MetadataSpread {
 public:
  // Without routes there are no counts.
  __device__ MetadataSpread(const CallParams& call, const HierarchicalLayout& layout,
                            const DomainEagerBuffers& eager, uint64_t sequence, bool has_routes,
                            bool has_weights)
      : call_(call),
        layout_(layout),
        eager_(eager),
        sequence_(sequence),
        has_routes_(has_routes),
        has_weights_(has_weights),
        count_pairs_(has_routes ? CountPairs(call.num_experts) : 0),
        parts_(count_pairs_, has_routes, has_weights, call.num_assignments()) {}

  __device__ int NumItems() const { return layout_.domains.num_rails() * ItemsPerRail(); }

  __device__ Outcome Run(int item) const {
    const Rail rail(call_, layout_, item / ItemsPerRail());
    const Outcome outcome = WaitForMessage(call_, layout_, sequence_, rail, 0);
    if (outcome != Outcome::kArrived) return outcome;
    const Outcome checked = CheckPartner(call_, rail, 0, sequence_);
    if (checked != Outcome::kArrived) {
      if (LaneIndex() == 0) RecordFailure(call_, checked);
      return checked;
    }
    const int part = item % ItemsPerRail();
    if (part < CountItems()) {
      SpreadCounts(rail, 32 * part + LaneIndex());
    } else {
      SpreadAssignments(rail, 32 * (part - CountItems()) + LaneIndex());
    }
    return Outcome::kArrived;
  }

 private:
  __device__ int CountItems() const { return CeilDivide(count_pairs_, 32); }
  __device__ int ItemsPerRail() const {
    const bool has_packets = has_routes_ || has_weights_;
    return CountItems() + (has_packets ? CeilDivide(call_.num_assignments(), 32) : 0);
  }

  __device__ void SpreadCounts(const Rail& rail, int pair) const {
    if (pair >= count_pairs_) return;
    const auto* const counts = reinterpret_cast<const int2*>(rail.Received(0) + kHeaderBytes);
    const int2 found = LoadGlobalNoAllocate(&counts[pair]);
    const uint64_t data = static_cast<uint32_t>(found.x) | uint64_t{static_cast<uint32_t>(found.y)}
                                                               << 32;
    ForEachDomainRank(call_, layout_.domains, eager_.rank(), [&](int to) {
      StorePacket(eager_.At(to).counts() + (rail.partner() * count_pairs_ + pair), data,
                  eager_.tag());
    });
  }

  __device__ void SpreadAssignments(const Rail& rail, int assignment) const {
    if (assignment >= call_.num_assignments()) return;
    const uint8_t* const from = rail.Received(0);
    const auto load = [&](int64_t offset) {
      const auto* const words = reinterpret_cast<const int32_t*>(from + offset);
      return static_cast<uint32_t>(LoadGlobalNoAllocate(&words[assignment]));
    };
    const uint32_t route = has_routes_ ? load(parts_.routes) : 0;
    const uint32_t weight = has_weights_ ? load(parts_.weights) : 0;
    ForEachDomainRank(call_, layout_.domains, eager_.rank(), [&](int to) {
      StorePacket(eager_.At(to).packets() + (rail.partner() * call_.num_assignments() + assignment),
                  route | uint64_t{weight} << 32, eager_.tag());
    });
  }

  const CallParams& call_;
  const HierarchicalLayout& layout_;
  const DomainEagerBuffers& eager_;
  const uint64_t sequence_;
  const bool has_routes_;
  const bool has_weights_;
  const int count_pairs_;
  const MetadataParts parts_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_LOW_LATENCY_SPREAD_CUH_
