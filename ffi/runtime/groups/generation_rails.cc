#include "ffi/runtime/groups/generation_rails.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
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

RailLayout LayoutOf(const Domains& domains, size_t rank) {
  return {domains, static_cast<int>(rank), RailSlots(domains.count)};
}

Status ProbeFailure(const std::string& network, const std::string& message) {
  return FailedPrecondition("the network between hosts, ", network,
                            ", does not pass its probe: ", message,
                            ". Choose another transport or device (UCX_TLS, UCX_NET_DEVICES; "
                            "NVSHMEM_REMOTE_TRANSPORT), or set JAX_EP_NETWORK=none");
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
    for (int memory : rank.others) rank.network->Close(memory);
    if (rank.memory != nullptr) static_cast<void>(rank.network->Unregister(rank.memory));
    if (rank.allocated != nullptr) rank.network->Free(rank.allocated);
  }
}

bool GenerationRails::kernels_put() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
    return rank.network != nullptr && rank.network->kernels_put();
  });
}

Status GenerationRails::Allocate(size_t rank, size_t bytes, void** memory, bool* out_of_memory) {
  Rank& own = ranks_[rank];
  const Status status = own.network->Allocate(bytes, &own.allocated, out_of_memory);
  *memory = own.allocated;
  return OfRank(rank, status);
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
    for (int rail = 0; rail < domains_.num_rails(); ++rail) {
      const int partner = domains_.RailPartner(number, rail);
      const auto other = static_cast<size_t>(partner);
      RankMemoryAddresses addresses;
      int memory = 0;
      std::string network;
      Status status = Open(rank, other, offers[other], &addresses, &memory, &network);
      if (!status.ok()) return status;
      Debug("  rank ", rank, " puts to rank ", partner, " by ", network);
      own.partners.push_back(addresses);
      own.memories.push_back(memory);
      own.names.push_back(network);
    }
    if (own.network->kernels_put()) continue;
    own.sender = MakeSender(rank, own.requests);
    own.network->thread().Add(own.sender);
  }
  return {};
}

Status GenerationRails::Open(size_t rank, size_t other, const std::string& offer,
                             RankMemoryAddresses* addresses, int* memory,
                             std::string* network) const {
  if (offer.size() < sizeof *addresses) {
    return FailedPrecondition("rank ", other, " has not offered its memory to the network");
  }
  std::memcpy(addresses, offer.data(), sizeof *addresses);
  return OfRank(rank, ranks_[rank].network->Open(offer.substr(sizeof *addresses), memory, network));
}

SymmetricRails GenerationRails::Symmetric(size_t rank) const {
  const Rank& own = ranks_[rank];
  SymmetricRails rails = {};
  rails.rings = reinterpret_cast<unsigned char*>(own.addresses.rails);
  rails.num_rails = domains_.num_rails();
  rails.domain = domains_.Domain(static_cast<int>(rank));
  for (size_t rail = 0; rail < own.partners.size(); ++rail) {
    const auto [inbox, rings] = own.partners[rail];
    const Network::Target target = own.network->TargetOf(own.memories[rail], inbox);
    SymmetricRails::Partner& partner = rails.partners[rail];
    partner.pe = target.process;
    partner.inbox = reinterpret_cast<Inbox*>(target.address);
    if (rings == 0) continue;
    partner.rings = reinterpret_cast<unsigned char*>(target.address + (rings - inbox));
  }
  return rails;
}

Status GenerationRails::MapInbox(size_t rank, size_t other, const std::string& offer,
                                 Inbox** inbox) {
  Rank& own = ranks_[rank];
  RankMemoryAddresses addresses;
  int memory = 0;
  std::string network;
  Status status = Open(rank, other, offer, &addresses, &memory, &network);
  if (!status.ok()) return status;
  own.others.push_back(memory);
  *inbox = reinterpret_cast<Inbox*>(own.network->Map(memory, addresses.inbox));
  if (*inbox != nullptr) return {};
  return OfRank(rank, FailedPrecondition(network, " does not map the memory of rank ", other,
                                         ", which is in the same NVLink domain"));
}

std::shared_ptr<RailSender> GenerationRails::MakeSender(size_t rank,
                                                        const RailRequests* requests) const {
  const Rank& own = ranks_[rank];
  return std::make_shared<RailSender>(requests, LayoutOf(domains_, rank), own.addresses,
                                      own.memories, own.partners);
}

Status GenerationRails::Probe(const std::vector<RankMemoryCopies>& copies, const RankNames& names,
                              uint64_t generation, double seconds) {
  Stopwatch stopwatch;
  std::vector<std::shared_ptr<RailSender>> senders(ranks_.size());
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    Rank& own = ranks_[rank];
    if (own.network == nullptr) continue;
    own.probe = std::make_unique<RailProbe>(LayoutOf(domains_, rank), own.addresses, copies[rank],
                                            names, generation);
    senders[rank] = MakeSender(rank, own.probe->requests());
    own.network->thread().Add(senders[rank]);
  }
  Status first = RunProbes(seconds);
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (senders[rank] == nullptr) continue;
    Status status =
        OfRank(rank, ranks_[rank].network->thread().Remove(senders[rank], kFlushSeconds));
    if (first.ok()) first = std::move(status);
  }
  Debug("  rails probed in ", stopwatch.Lap());
  return first;
}

Status GenerationRails::RunProbes(double seconds) {
  using Clock = std::chrono::steady_clock;
  auto last_found = Clock::now();
  while (true) {
    bool found = false;
    const Rank* missing = nullptr;
    for (Rank& rank : ranks_) {
      if (rank.probe == nullptr || rank.probe->IsDone()) continue;
      Status status = rank.probe->Step(&found);
      if (!status.ok()) return ProbeFailure(rank.names[rank.probe->last_rail()], status.message);
      if (!rank.probe->IsDone()) missing = &rank;
    }
    if (missing == nullptr) return {};
    if (Status status = Failure(); !status.ok()) return status;
    const auto now = Clock::now();
    if (found) last_found = now;
    if (now - last_found > std::chrono::duration<double>(seconds)) {
      size_t rail = 0;
      const std::string message = missing->probe->Missing(&rail);
      return ProbeFailure(missing->names[rail], Concatenate(message, " within ", seconds, " s"));
    }
    if (!found) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

Status GenerationRails::EndProbe() {
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    Rank& own = ranks_[rank];
    if (own.probe == nullptr) continue;
    if (Status status = OfRank(rank, own.probe->Clear()); !status.ok()) return status;
    own.probe.reset();
  }
  return {};
}

Status GenerationRails::Flush() {
  const std::lock_guard one_at_a_time(flushing_);
  Status first;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    Rank& own = ranks_[rank];
    if (own.network != nullptr && own.network->kernels_put() && own.memory != nullptr) {
      const Status status = OfRank(rank, own.network->Flush(kFlushSeconds));
      if (first.ok()) first = status;
    }
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
