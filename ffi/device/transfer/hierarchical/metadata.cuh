// Metadata: what a rank tells its rail partners ahead of rows. They are counts, routes and weights
// in a dispatch, and weights in a redispatch. A partner spreads them in its domain, so each rank
// gets the metadata of all ranks, and sends a few messages of it on each rail.
//
// A rank sends metadata when all ranks of its domain have entered the call. So all ranks of the
// group have entered it when a rank has got the metadata of all of its rails, and no call ends
// before.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_METADATA_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_METADATA_CUH_

#include "ffi/device/protocol/work_items.cuh"
#include "ffi/device/transfer/eager_buffers.cuh"
#include "ffi/device/transfer/hierarchical/domain.cuh"
#include "ffi/device/transfer/hierarchical/rail.cuh"
#include "ffi/device/transfer/hierarchical/streams.cuh"

namespace jax_ep {

// Whether the metadata of one rail is there, and spread. Acquire. NETWORK_WAIT_LOCAL
__device__ inline bool HasMetadata(const CallParams& call, const HierarchicalLayout& layout,
                                   int rail) {
  return LoadAcquireDevice(&call.control->hierarchical.metadata_spread[rail]) ==
         static_cast<uint32_t>(layout.num_metadata);
}

// Called by one warp. Whether the metadata of all rails is there, and spread.
__device__ inline bool HasAllMetadata(const CallParams& call, const HierarchicalLayout& layout) {
  return AllRails(layout, [&](int rail) { return HasMetadata(call, layout, rail); });
}

// Whether this rank's work items before the exchange are finished. Acquire.
__device__ inline bool HasFinishedPrologue(const CallParams& call) {
  return AreItemsFinished(&call.control->progress.items_finished, call.num_prologue_items);
}

// The streams of messages of metadata: those that are sent on each rail, then those that arrive.
// Run by a role after WaitForDomainEntry.
class MetadataStreams {
 public:
  // With routes, `eager` has the counts. `weights` may be null.
  __device__ MetadataStreams(const CallParams& call, const HierarchicalLayout& layout,
                             const RoleContext& role, const EagerBuffers* eager,
                             const float* weights, uint64_t sequence)
      : call_(call),
        layout_(layout),
        role_(role),
        eager_(eager),
        weights_(weights),
        sequence_(sequence),
        num_pairs_(eager == nullptr ? 0 : CountPairs(call.num_experts)) {}

  __device__ int count() const { return 2 * layout_.domains.num_rails(); }
  __device__ int First(int block) const { return block % count(); }
  __device__ int NumItems(int /*stream*/) const { return layout_.num_metadata; }
  __device__ bool IsReady(int stream, int message) const {
    if (IsSent(stream)) {
      // The routes are complete.
      return HasFinishedPrologue(call_) && RailOf(stream).MayPack(message);
    }
    return RailOf(stream).HasArrived(message);
  }
  __device__ int Peer(int stream, int /*message*/) const { return RailOf(stream).partner(); }
  __device__ bool HasEntered() const { return HasAllMetadata(call_, layout_); }

  __device__ SpanKind SpanOf(int /*stream*/) const { return SpanKind::kSendRoutes; }
  __device__ void Complete(int /*stream*/, int /*message*/) {}

  __device__ void Run(int stream, int message) {
    const Rail rail = RailOf(stream);
    if (IsSent(stream)) {
      Send(rail, message);
    } else {
      Spread(rail, message);
    }
  }

 private:
  __device__ bool IsSent(int stream) const { return stream < layout_.domains.num_rails(); }
  __device__ Rail RailOf(int stream) const {
    return {call_, layout_, IsSent(stream) ? stream : stream - layout_.domains.num_rails()};
  }

  // The parts of a message, after its header: counts in the first one, routes and weights of a
  // range of assignments.
  __device__ int FirstAssignment(int message) const {
    return message * layout_.metadata_assignments;
  }
  __device__ int Count(int message) const {
    return min(layout_.metadata_assignments, call_.num_assignments() - FirstAssignment(message));
  }
  __device__ int64_t RoutesOffset(int message) const {
    return kHeaderBytes + (message == 0 ? num_pairs_ * int64_t{sizeof(uint64_t)} : 0);
  }
  __device__ int64_t WeightsOffset(int message) const {
    return RoutesOffset(message) +
           (eager_ == nullptr ? 0 : layout_.metadata_assignments * int64_t{sizeof(Route)});
  }

  // Called by a role. Loads several values per thread before it stores them, to hide latency.
  template <typename Load, typename Store>
  __device__ void Copy(int count, Load load, Store store) const {
    constexpr int kPerThread = 8;
#pragma unroll 1
    for (int base = role_.Thread(); base < count; base += kPerThread * role_.num_threads) {
      decltype(load(0)) values[kPerThread];
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const int i = base + j * role_.num_threads;
        if (i < count) values[j] = load(i);
      }
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const int i = base + j * role_.num_threads;
        if (i < count) store(i, values[j]);
      }
    }
  }

  __device__ void Send(const Rail& rail, int message) const {
    const PeerPointer<uint8_t> to = rail.Packed(message);
    const int rank = call_.control->rank;
    const int first = FirstAssignment(message);
    const int count = Count(message);
    const int64_t weights_bytes = weights_ == nullptr ? 0 : count * int64_t{sizeof(float)};
    if (role_.Thread() == 0) {
      PackHeader(call_, rail, message, WeightsOffset(message) + weights_bytes, 0, false);
    }
    if (eager_ != nullptr) {
      const auto* const packets = eager_->Local().counts() + rank * num_pairs_;
      const PeerPointer<uint64_t> counts = (to + kHeaderBytes).As<uint64_t>();
      for (int i = role_.Thread(); message == 0 && i < num_pairs_; i += role_.num_threads) {
        uint64_t data, tag;
        LoadRelaxedSystem(&packets[i], &data, &tag);
        StoreToPeer(counts + i, data);
      }
      const auto* const routes =
          call_.LocalBuffer<const Route>(kRoutes) + int64_t{rank} * call_.num_assignments() + first;
      const PeerPointer<Route> sent = (to + RoutesOffset(message)).As<Route>();
      Copy(
          count, [&](int i) { return routes[i]; },
          [&](int i, const Route& route) { StoreToPeer(sent + i, route); });
    }
    if (weights_ != nullptr) {
      const PeerPointer<float> sent = (to + WeightsOffset(message)).As<float>();
      Copy(
          count, [&](int i) { return weights_[first + i]; },
          [&](int i, float weight) { StoreToPeer(sent + i, weight); });
    }
    role_.Sync();
    if (role_.Thread() == 0) rail.Put(message);
  }

  // Stores what the partner has sent to all ranks of this domain, this one included.
  __device__ void Spread(const Rail& rail, int message) const {
    const Domains& domains = layout_.domains;
    const DomainRanks ranks = {&domains};
    const uint8_t* const from = rail.Received(message);
    const int rank = call_.control->rank;
    const int source = rail.partner();
    const int first = FirstAssignment(message);
    const int count = Count(message);
    CheckPartner(call_, rail, message, role_, sequence_);
    const int64_t first_assignment = int64_t{source} * call_.num_assignments() + first;
    const auto* const counts = reinterpret_cast<const int2*>(from + kHeaderBytes);
    const auto* const routes = reinterpret_cast<const int2*>(from + RoutesOffset(message));
    const auto* const weights = reinterpret_cast<const float*>(from + WeightsOffset(message));
#pragma unroll 1
    for (int distance = 1; distance <= domains.size; ++distance) {
      const int to = ranks.After(call_, rank, distance);
      if (eager_ != nullptr) {
        const PeerPointer<CountPacket> packets = eager_->At(to).counts() + source * num_pairs_;
        for (int i = role_.Thread(); message == 0 && i < num_pairs_; i += role_.num_threads) {
          const int2 pair = LoadGlobalNoAllocate(&counts[i]);
          StorePacket(packets + i,
                      static_cast<uint32_t>(pair.x) | uint64_t{static_cast<uint32_t>(pair.y)} << 32,
                      eager_->tag());
        }
        const PeerPointer<int2> stored =
            (PeerBuffer<Route>(call_, to, kRoutes) + first_assignment).As<int2>();
        Copy(
            count, [&](int i) { return LoadGlobalNoAllocate(&routes[i]); },
            [&](int i, int2 route) { StoreToPeer(stored + i, route); });
      }
      if (weights_ == nullptr) continue;
      const PeerPointer<float> stored =
          PeerBuffer<float>(call_, to, kReceivedWeights) + first_assignment;
      Copy(
          count, [&](int i) { return LoadGlobalNoAllocate(&weights[i]); },
          [&](int i, float weight) { StoreToPeer(stored + i, weight); });
    }
    FinishItem(&call_.control->hierarchical.metadata_spread[rail.index()], true, role_);
    if (role_.Thread() == 0) rail.ReturnCredit(message);
  }

  const CallParams& call_;
  const HierarchicalLayout& layout_;
  const RoleContext& role_;
  const EagerBuffers* const eager_;
  const float* const weights_;
  const uint64_t sequence_;
  const int num_pairs_;
};

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_METADATA_CUH_
