#include "ffi/runtime/network/rail_sender.h"

#include <atomic>
#include <cstddef>

#include "ffi/device/transfer/hierarchical/layout.h"

namespace jax_ep {
namespace {

// Acquire: what the device has stored before it asked is what a put reads.
uint64_t Load(const uint64_t& word) {
  return std::atomic_ref(const_cast<uint64_t&>(word)).load(std::memory_order_acquire);
}

}  // namespace

RailSender::RailSender(const RailRequests* requests, const RailLayout& layout,
                       const RankMemoryAddresses& own, const std::vector<int>& memories,
                       const std::vector<RankMemoryAddresses>& partners)
    : requests_(requests),
      slots_(layout.slots),
      send_rings_(own.rails +
                  uint64_t(layout.domains.num_rails()) * uint64_t(layout.slots) * kRailSlotBytes),
      messages_(partners.size() * size_t(layout.slots)),
      credits_(messages_.size()) {
  const Domains& domains = layout.domains;
  const int here = domains.Domain(layout.rank);
  for (size_t rail = 0; rail < partners.size(); ++rail) {
    const int there = domains.RailEnd(here, static_cast<int>(rail));
    const uint64_t first_slot = uint64_t(domains.Rail(there, here)) * uint64_t(slots_);
    const auto [inbox, rails] = partners[rail];
    rails_.push_back({.memory = memories[rail],
                      .ring = rails + first_slot * kRailSlotBytes,
                      .messages = inbox + offsetof(Inbox, rail_messages) + 8 * first_slot,
                      .credits = inbox + offsetof(Inbox, rail_credits) + 8 * first_slot,
                      .abort = inbox + offsetof(Inbox, abort),
                      .leave = inbox + offsetof(Inbox, rail_leaves) + 8 * uint64_t(here)});
  }
}

Status RailSender::Poll(Network& network, bool* found) {
  *found = false;
  for (size_t i = 0; i < messages_.size(); ++i) {
    const Far& far = rails_[i / size_t(slots_)];
    const uint64_t slot = i % size_t(slots_);
    const uint64_t credit = Load(requests_->credits[i]);
    if (credit != credits_[i]) {
      credits_[i] = credit;
      *found = true;
      Status status =
          network.Start({.memory = far.memory, .flag = far.credits + 8 * slot, .value = credit});
      if (!status.ok()) return status;
    }
    const uint64_t request = Load(requests_->messages[i]);
    if (request == messages_[i]) continue;
    messages_[i] = request;
    *found = true;
    Status status =
        network.Start({.memory = far.memory,
                       .from = reinterpret_cast<const void*>(send_rings_ + i * kRailSlotBytes),
                       .to = far.ring + slot * kRailSlotBytes,
                       .bytes = MessageBytes(request),
                       .flag = far.messages + 8 * slot,
                       .value = MessageNumber(request)});
    if (!status.ok()) return status;
  }
  Status status = TellAll(network, requests_->abort, &Far::abort, &abort_, found);
  if (status.ok()) status = TellAll(network, requests_->leave, &Far::leave, &leave_, found);
  return status;
}

Status RailSender::TellAll(Network& network, const uint64_t& request, uint64_t Far::* flag,
                           uint64_t* told, bool* found) const {
  const uint64_t value = Load(request);
  if (value == *told) return {};
  *told = value;
  *found = true;
  for (const Far& far : rails_) {
    Status status = network.Start({.memory = far.memory, .flag = far.*flag, .value = value});
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace jax_ep
