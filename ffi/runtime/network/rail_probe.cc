#include "ffi/runtime/network/rail_probe.h"

#include <algorithm>
#include <atomic>
#include <iterator>
#include <utility>

#include "ffi/device/transfer/hierarchical/layout.h"

namespace jax_ep {
namespace {

constexpr int kSlots = 4;
constexpr int kMessages = 3 * kSlots;  // each rail has so many, numbered from 1
// Messages end anywhere, and those of a slot differ in size.
constexpr size_t kSizes[] = {kRailSlotBytes, 1, 4097, 8, 65536};

size_t Bytes(int message) { return kSizes[size_t(message) % std::size(kSizes)]; }

// Returns the bytes of a message; no other message has the same.
std::vector<uint8_t> Pattern(uint64_t generation, int sender, int receiver, int message) {
  std::vector<uint8_t> pattern(Bytes(message));
  uint64_t state =
      generation << 32 | uint64_t(sender) << 20 | uint64_t(receiver) << 8 | uint64_t(message);
  for (uint8_t& byte : pattern) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<uint8_t>(state >> 56);
  }
  return pattern;
}

// Release: what was copied before.
void Store(uint64_t* word, uint64_t value) {
  std::atomic_ref(*word).store(value, std::memory_order_release);
}

}  // namespace

RailProbe::RailProbe(const RailLayout& layout, const RankMemoryAddresses& own,
                     RankMemoryCopies copies, RankNames names, uint64_t generation)
    : layout_(layout),
      own_(own),
      copies_(std::move(copies)),
      names_(std::move(names)),
      generation_(generation),
      slots_(std::min(kSlots, layout.slots)),
      requests_(std::make_unique<RailRequests>()),
      messages_(size_t(layout.domains.num_rails()) * size_t(layout.slots)),
      credits_(messages_.size()) {
  for (int rail = 0; rail < layout.domains.num_rails(); ++rail) {
    rails_.push_back({.partner = layout.domains.RailPartner(layout.rank, rail)});
  }
}

uint64_t RailProbe::Slot(size_t rail, int message) const {
  return rail * size_t(layout_.slots) + size_t((message - 1) % slots_);
}

Status RailProbe::ReadFlags() {
  const size_t bytes = messages_.size() * sizeof(uint64_t);
  Status status =
      copies_.read(own_.inbox + offsetof(Inbox, rail_messages), messages_.data(), bytes);
  if (!status.ok()) return status;
  return copies_.read(own_.inbox + offsetof(Inbox, rail_credits), credits_.data(), bytes);
}

Status RailProbe::Step(bool* found) {
  if (Status status = ReadFlags(); !status.ok()) return status;
  for (size_t i = 0; i < rails_.size(); ++i) {
    Rail& rail = rails_[i];
    while (rail.credited < rail.sent &&
           credits_[Slot(i, rail.credited + 1)] >= uint64_t(rail.credited) + 1) {
      ++rail.credited;
      *found = true;
    }
    while (rail.received < kMessages &&
           messages_[Slot(i, rail.received + 1)] >= uint64_t(rail.received) + 1) {
      if (Status status = Receive(i); !status.ok()) return status;
      *found = true;
    }
    while (rail.sent < kMessages && rail.sent < rail.credited + slots_) {
      if (Status status = Send(i); !status.ok()) return status;
      *found = true;
    }
  }
  return {};
}

Status RailProbe::Send(size_t rail) {
  const int message = ++rails_[rail].sent;
  const uint64_t slot = Slot(rail, message);
  const std::vector<uint8_t> pattern =
      Pattern(generation_, layout_.rank, rails_[rail].partner, message);
  const uint64_t send_rings = own_.rails + messages_.size() * uint64_t(kRailSlotBytes);
  Status status = copies_.write(send_rings + slot * kRailSlotBytes, pattern.data(), pattern.size());
  if (!status.ok()) return status;
  Store(&requests_->messages[slot], RequestOfMessage(uint64_t(message), pattern.size()));
  return {};
}

Status RailProbe::Receive(size_t rail) {
  last_rail_ = rail;
  const int partner = rails_[rail].partner;
  const int message = ++rails_[rail].received;
  const uint64_t slot = Slot(rail, message);
  const std::vector<uint8_t> expected = Pattern(generation_, partner, layout_.rank, message);
  std::vector<uint8_t> bytes(expected.size());
  Status status = copies_.read(own_.rails + slot * kRailSlotBytes, bytes.data(), bytes.size());
  if (!status.ok()) return status;
  const auto [wrong, right] = std::mismatch(bytes.begin(), bytes.end(), expected.begin());
  if (wrong != bytes.end()) {
    return FailedPrecondition("a message of ", bytes.size(), " bytes ", From(partner, layout_.rank),
                              " has ", int(*wrong), " at byte ", wrong - bytes.begin(),
                              " when its flag is there; expected ", int(*right));
  }
  Store(&requests_->credits[slot], uint64_t(message));
  return {};
}

bool RailProbe::IsDone() const {
  return std::all_of(rails_.begin(), rails_.end(), [](const Rail& rail) {
    return rail.received == kMessages && rail.credited == kMessages;
  });
}

std::string RailProbe::From(int sender, int receiver) const {
  return Concatenate("from rank ", sender, " (", names_(sender), ") to rank ", receiver, " (",
                     names_(receiver), ")");
}

std::string RailProbe::Missing(size_t* rail) const {
  for (*rail = 0; *rail < rails_.size(); ++*rail) {
    const Rail& tried = rails_[*rail];
    if (tried.received < kMessages) {
      return Concatenate("a message of ", Bytes(tried.received + 1), " bytes ",
                         From(tried.partner, layout_.rank), " has not arrived");
    }
    if (tried.credited < kMessages) {
      return Concatenate("the answer to a message of ", Bytes(tried.credited + 1), " bytes ",
                         From(layout_.rank, tried.partner), " has not arrived");
    }
  }
  *rail = 0;
  return "nothing";
}

Status RailProbe::Clear() const {
  const std::vector<uint64_t> zeros(messages_.size());
  const size_t bytes = zeros.size() * sizeof(uint64_t);
  Status status = copies_.write(own_.inbox + offsetof(Inbox, rail_messages), zeros.data(), bytes);
  if (!status.ok()) return status;
  return copies_.write(own_.inbox + offsetof(Inbox, rail_credits), zeros.data(), bytes);
}

}  // namespace jax_ep
