#include "ffi/runtime/groups/generation_rails.h"

#include <cstring>
#include <utility>

#include "ffi/device/transfer/hierarchical/layout.h"
#include "ffi/runtime/debug.h"

namespace jax_ep {
namespace {

// Messages under way arrive within milliseconds, or never.
constexpr double kFlushSeconds = 10;

Status OfRank(size_t rank, const Status& status) {
  if (status.ok()) return status;
  return FailedPrecondition("the network of rank ", rank, ": ", status.message);
}

}  // namespace

GenerationRails::GenerationRails(const Domains& domains,
                                 const std::vector<std::shared_ptr<DeviceNetwork>>& networks)
    : domains_(domains), ranks_(networks.size()) {
  for (size_t rank = 0; rank < networks.size(); ++rank) ranks_[rank].network = networks[rank];
}

GenerationRails::~GenerationRails() {
  static_cast<void>(Flush());
  for (Rank& rank : ranks_) {
    for (int memory : rank.memories) rank.network->Close(memory);
    if (rank.memory != nullptr) static_cast<void>(rank.network->Unregister(rank.memory));
  }
}

Status GenerationRails::Register(size_t rank, void* memory, size_t bytes,
                                 const RankMemoryAddresses& addresses,
                                 const RailRequests* requests) {
  Rank& own = ranks_[rank];
  if (Status status = own.network->Register(memory, bytes, &own.offer); !status.ok()) {
    return OfRank(rank, status);
  }
  own.memory = memory;
  own.addresses = addresses;
  own.requests = requests;
  return {};
}

std::string GenerationRails::Offer(size_t rank) const {
  const Rank& own = ranks_[rank];
  return std::string(reinterpret_cast<const char*>(&own.addresses), sizeof own.addresses) +
         own.offer;
}

Status GenerationRails::Connect(const std::vector<std::string>& offers) {
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    Rank& own = ranks_[rank];
    if (own.network == nullptr) continue;
    const int number = static_cast<int>(rank);
    std::vector<RankMemoryAddresses> partners;
    for (int rail = 0; rail < domains_.num_rails(); ++rail) {
      const int partner = domains_.RailPartner(number, rail);
      const std::string& offer = offers[static_cast<size_t>(partner)];
      RankMemoryAddresses addresses;
      if (offer.size() < sizeof addresses) {
        return FailedPrecondition("rank ", partner, " has not offered its memory to the network");
      }
      std::memcpy(&addresses, offer.data(), sizeof addresses);
      partners.push_back(addresses);
      int memory = 0;
      std::string network;
      Status status = own.network->Open(offer.substr(sizeof addresses), &memory, &network);
      if (!status.ok()) return OfRank(rank, status);
      Debug("  rank ", rank, " puts to rank ", partner, " by ", network);
      own.memories.push_back(memory);
    }
    const RailLayout layout = {domains_, number, RailSlots(domains_.count)};
    own.sender =
        std::make_shared<RailSender>(own.requests, layout, own.addresses, own.memories, partners);
    own.network->thread().Add(own.sender);
  }
  return {};
}

Status GenerationRails::Flush() {
  const std::lock_guard one_at_a_time(flushing_);
  Status first;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    Rank& own = ranks_[rank];
    if (own.sender == nullptr) continue;
    Status status = OfRank(rank, own.network->thread().Remove(own.sender, kFlushSeconds));
    own.sender.reset();
    if (first.ok()) first = std::move(status);
  }
  return first;
}

Status GenerationRails::Failure() const {
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (ranks_[rank].network == nullptr) continue;
    Status status = OfRank(rank, ranks_[rank].network->thread().Failure());
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace jax_ep
