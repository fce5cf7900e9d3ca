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

// The items of a call's metadata: messages that are sent on each rail, and those that arrive.
// Blocks take them by tickets, and wait for what an item needs: unlike the items of streams they
// are few, and a poll of one takes a microsecond. An item waits for lower tickets only, here or at
// a partner, so any number of blocks makes progress. That is why items come in rounds: as many
// messages on each rail as its ring holds, then as many from it.
class Metadata {
 public:
  // With routes, `eager` has the counts. `weights` may be null. For a role after
  // WaitForDomainEntry.
  __device__ Metadata(const CallParams& call, const HierarchicalLayout& layout,
                      const RoleContext& role, const EagerBuffers* eager, const float* weights,
                      uint64_t sequence)
      : call_(call),
        layout_(layout),
        role_(role),
        eager_(eager),
        weights_(weights),
        sequence_(sequence),
        num_pairs_(eager == nullptr ? 0 : CountPairs(call.num_experts)) {}

  // Called by the role. Takes the next item.
  __device__ int NextItem() const {
    return NextTicket(&call_.control->hierarchical.metadata_tickets, role_);
  }
  // Whether an item is a message that waits for no other one of this call.
  __device__ bool IsFirstSend(int item) const {
    return item < layout_.domains.num_rails() * MessagesPerRound();
  }

  // Called by the role, with its first item, when this rank's items before the exchange are
  // finished. Sends and spreads messages until there are none left, or a wait fails. Calls
  // have_sent() before the first item of another kind than IsFirstSend.
  template <typename HaveSent>
  __device__ Outcome Exchange(int number, HaveSent have_sent) const {
    const int num_items = 2 * layout_.domains.num_rails() * layout_.num_metadata;
    for (; number < num_items; number = NextItem()) {
      if (!IsFirstSend(number)) have_sent();
      const Item item = ItemOf(number);
      const Outcome outcome =
          WaitByFirstWarp(call_, sequence_, role_, [&] { return WaitFor(item); });
      if (outcome != Outcome::kArrived) return outcome;
      const ProfileSpan span(SpanKind::kSendRoutes);
      if (item.is_sent) {
        Send({call_, layout_, item.rail}, item.message);
      } else {
        Spread({call_, layout_, item.rail}, item.message);
      }
    }
    return Outcome::kArrived;
  }

 private:
  struct Item {
    bool is_sent;
    int rail;
    int message;
  };

  __device__ int MessagesPerRound() const { return min(layout_.num_metadata, layout_.rail_slots); }
  __device__ Item ItemOf(int number) const {
    const int rails = layout_.domains.num_rails();
    const int first = number / (2 * rails * MessagesPerRound()) * MessagesPerRound();
    const int messages = min(MessagesPerRound(), layout_.num_metadata - first);
    const int index = number - 2 * rails * first;
    const bool is_sent = index < rails * messages;
    const int in_half = is_sent ? index : index - rails * messages;
    return {is_sent, in_half % rails, first + in_half / rails};
  }

  __device__ Outcome WaitFor(const Item& item) const {
    const ProfileSpan span(SpanKind::kWaitItem);
    const Rail rail(call_, layout_, item.rail);
    Deadline deadline(call_, WaitPoint::kEntry, sequence_);
    Outcome outcome;
    for (uint32_t polls = 1;; ++polls) {
      // All lanes acquire.
      const bool is_ready = !__any_sync(
          kFullWarp, !(item.is_sent ? rail.MayPack(item.message) : rail.HasArrived(item.message)));
      // The abort word overrides the flags, so it is loaded after them. NETWORK_PUT_ABORT
      outcome = FindAbort(call_);
      if (outcome != Outcome::kArrived || is_ready) break;
      if (polls % kPollsPerCheck == 0) {
        outcome = deadline.Check(static_cast<uint32_t>(rail.partner()));
        if (outcome == Outcome::kArrived) outcome = FindLeaver(call_, sequence_);
        if (outcome != Outcome::kArrived) break;
      }
      __nanosleep(40);
    }
    if (outcome != Outcome::kArrived && LaneIndex() == 0) RecordFailure(call_, outcome);
    __syncwarp();  // orders what each lane has acquired before what any lane does next
    return outcome;
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

  // Called by the role. Copies values to targets, whose addresses target(t) returns. Loads several
  // values per thread before it stores them, to hide latency.
  template <typename T, typename Target>
  __device__ void Copy(int count, const T* from, int num_targets, Target target) const {
    constexpr int kPerThread = 8;
#pragma unroll 1
    for (int base = role_.Thread(); base < count; base += kPerThread * role_.num_threads) {
      T values[kPerThread];
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        const int i = base + j * role_.num_threads;
        if (i < count) values[j] = LoadGlobalNoAllocate(&from[i]);
      }
#pragma unroll 1
      for (int t = 0; t < num_targets; ++t) {
        const PeerPointer<T> to = target(t);
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) {
          const int i = base + j * role_.num_threads;
          if (i < count) StoreToPeer(to + i, values[j]);
        }
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
          call_.LocalBuffer<const int2>(kRoutes) + int64_t{rank} * call_.num_assignments() + first;
      Copy(count, routes, 1, [&](int) { return (to + RoutesOffset(message)).As<int2>(); });
    }
    if (weights_ != nullptr) {
      Copy(count, weights_ + first, 1,
           [&](int) { return (to + WeightsOffset(message)).As<float>(); });
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
    const auto rank_at = [&](int target) { return ranks.After(call_, rank, target + 1); };
    if (eager_ != nullptr) {
#pragma unroll 1
      for (int target = 0; message == 0 && target < domains.size; ++target) {
        const PeerPointer<CountPacket> packets =
            eager_->At(rank_at(target)).counts() + source * num_pairs_;
        for (int i = role_.Thread(); i < num_pairs_; i += role_.num_threads) {
          const int2 pair = LoadGlobalNoAllocate(&counts[i]);
          StorePacket(packets + i,
                      static_cast<uint32_t>(pair.x) | uint64_t{static_cast<uint32_t>(pair.y)} << 32,
                      eager_->tag());
        }
      }
      Copy(count, routes, domains.size, [&](int target) {
        return PeerBuffer<int2>(call_, rank_at(target), kRoutes) + first_assignment;
      });
    }
    if (weights_ != nullptr) {
      Copy(count, weights, domains.size, [&](int target) {
        return PeerBuffer<float>(call_, rank_at(target), kReceivedWeights) + first_assignment;
      });
    }
    FinishItem(&call_.control->hierarchical.metadata_spread[rail.index()], domains.size > 1, role_);
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
