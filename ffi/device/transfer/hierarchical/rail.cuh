// A rail: the network between a rank and its rail partner in another domain, by rings of messages
// in both directions. A message is packed into a slot, then put: the partner finds it whole, or not
// at all. Nothing is known of the order in which messages arrive.
//
// Over a network, a message is packed into a ring of this rank, and then put with its flag
// (rail_network.cuh). Domains may also be logical: where the rank reaches the partner's memory by
// stores, a message is packed right into the partner's ring.
#ifndef JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_RAIL_CUH_
#define JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_RAIL_CUH_

#include "ffi/device/protocol/abort.cuh"
#include "ffi/device/transfer/hierarchical/layout.h"
#include "ffi/device/transfer/hierarchical/rail_network.cuh"

namespace jax_ep {

// Messages are numbered over all calls of a generation, equally on all rails, since each call has
// equally many. Here they are named by their index in the call. A slot has a flag for its message
// at the receiver, and one for its credit at the sender. Neither is set again before its value was
// consumed. So a provider may also add to them.
class Rail {
 public:
  // A rank's rails are numbered from 0.
  __device__ Rail(const CallParams& call, const HierarchicalLayout& layout, int rail)
      : call_(call), layout_(layout), first_number_(call.control->rail_messages + 1) {
    const Domains& domains = layout.domains;
    const int rank = call.control->rank;
    const int here = domains.Domain(rank);
    domain_ = domains.RailEnd(here, rail);
    partner_ = domains.Rank(domain_, domains.Index(rank));
    index_ = rail;
    first_slot_ = rail * layout.rail_slots;
    partner_first_slot_ = domains.Rail(domain_, here) * layout.rail_slots;
  }

  __device__ int index() const { return index_; }      // among the rank's rails
  __device__ int domain() const { return domain_; }    // the partner's
  __device__ int partner() const { return partner_; }  // its rank

  // The sending end. The functions of both ends may be called by any thread.

  // Returns whether the message's slot is free. Acquire. NETWORK_WAIT_CREDIT
  __device__ bool MayPack(int message) const {
    const uint64_t number = Number(message);
    const auto slots = static_cast<uint32_t>(layout_.rail_slots);
    if (number <= slots) return true;
    const uint64_t* const credits = call_.control->inbox->rail_credits;
    return LoadAcquireSystem(&credits[first_slot_ + Slot(message)]) >= number - slots;
  }

  // Returns where to pack a message, of kRailSlotBytes. Over a network its slot is free, too, once
  // MayPack: who has returned the credit has the message, so it has been read.
  __device__ PeerPointer<uint8_t> Packed(int message) const {
    const ControlBlock* const control = call_.control;
    if (HasNetwork(control)) return PeerPointer<uint8_t>(SendSlot(message));
    return PeerPointer<uint8_t>(control->peers[partner_].workspace + layout_.rails_offset +
                                (partner_first_slot_ + Slot(message)) * kRailSlotBytes);
  }

  // Called by the thread that has packed the header. Release: after what it has stored, and what it
  // has acquired by counting. NETWORK_SIGNAL_DATA
  __device__ void Put(int message) const {
    const ControlBlock* const control = call_.control;
    if (HasNetwork(control)) {
      const uint8_t* const packed = SendSlot(message);
      const uint64_t bytes = reinterpret_cast<const MessageHeader*>(packed)->bytes;
      return PutMessage(control, SlotOf(message), packed, bytes, Number(message));
    }
    StoreRailFlag(call_.control, partner_, RailFlag::kMessage, partner_first_slot_ + Slot(message),
                  Number(message));
  }

  // The receiving end.

  // Returns whether a message has arrived. Acquire. NETWORK_WAIT_DATA
  __device__ bool HasArrived(int message) const {
    const uint64_t* const messages = call_.control->inbox->rail_messages;
    return LoadAcquireSystem(&messages[first_slot_ + Slot(message)]) >= Number(message);
  }

  __device__ const uint8_t* Received(int message) const {
    return RailMemory(call_.control, layout_, layout_.rails_offset) +
           ReceivedSlot(message) * kRailSlotBytes;
  }
  __device__ const MessageHeader& Header(int message) const {
    return *reinterpret_cast<const MessageHeader*>(Received(message));
  }
  // Returns the slot among all that the rank receives in; among all that it packs in, likewise.
  __device__ int ReceivedSlot(int message) const { return first_slot_ + Slot(message); }

  // Called by one thread, after everything in the message was read. NETWORK_SIGNAL_CREDIT
  __device__ void ReturnCredit(int message) const {
    const ControlBlock* const control = call_.control;
    if (HasNetwork(control)) return PutCredit(control, SlotOf(message), Number(message));
    StoreRailFlag(call_.control, partner_, RailFlag::kCredit, partner_first_slot_ + Slot(message),
                  Number(message));
  }

 private:
  __device__ uint64_t Number(int message) const { return first_number_ + message; }
  __device__ int Slot(int message) const {
    return static_cast<int>((Number(message) - 1) & (layout_.rail_slots - 1));
  }
  __device__ RailSlot SlotOf(int message) const {
    return {index_, ReceivedSlot(message), partner_first_slot_ + Slot(message)};
  }
  __device__ uint8_t* SendSlot(int message) const {
    return RailMemory(call_.control, layout_, layout_.send_rings_offset()) +
           ReceivedSlot(message) * kRailSlotBytes;
  }

  const CallParams& call_;
  const HierarchicalLayout& layout_;
  const uint64_t first_number_;
  int index_;
  int domain_;
  int partner_;
  int first_slot_;          // this rank's ring from the partner
  int partner_first_slot_;  // the partner's ring from this rank
};

// Called by one thread of a message's sender, before it is put.
__device__ inline void PackHeader(const CallParams& call, const Rail& rail, int message,
                                  int64_t bytes, uint64_t tokens, bool poisoned) {
  const PeerPointer<uint64_t> words = rail.Packed(message).As<uint64_t>();
  StoreToPeer(words, call.fingerprint);
  StoreToPeer(words + 1, tokens);
  StoreToPeer(words + 2, uint64_t{poisoned});
  StoreToPeer(words + 3, static_cast<uint64_t>(bytes));
}

// Called by one warp that has got a message. Aborts, and returns kMismatch, if the partner runs
// another call.
__device__ inline Outcome CheckPartner(const CallParams& call, const Rail& rail, int message,
                                       uint64_t sequence) {
  if (LoadRelaxedSystem(&rail.Header(message).fingerprint) == call.fingerprint) {
    return Outcome::kArrived;
  }
  AbortGroup(call, Outcome::kMismatch, WaitPoint::kEntry, rail.partner(), sequence);
  return Outcome::kMismatch;
}

// CheckPartner for a role.
__device__ inline void CheckPartner(const CallParams& call, const Rail& rail, int message,
                                    const RoleContext& role, uint64_t sequence) {
  if (role.Warp() == 0) CheckPartner(call, rail, message, sequence);
}

}  // namespace jax_ep

#endif  // JAX_EP_DEVICE_TRANSFER_HIERARCHICAL_RAIL_CUH_
