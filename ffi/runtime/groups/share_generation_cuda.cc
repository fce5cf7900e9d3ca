#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "ffi/runtime/debug.h"
#include "ffi/runtime/groups/share_generation.h"

namespace jax_ep {
namespace {

// A process's part of a step, followed by the message of an error, or by what its ranks offer to
// the network.
struct Offer {
  uint64_t number = 0;
  int64_t workspace_bytes = 0;
  uint32_t is_ok = 0;
  SharingFailure failure;
};

std::string Encode(Offer offer, const Status& status, const std::string& network = "") {
  offer.is_ok = status.ok();
  return std::string(reinterpret_cast<const char*>(&offer), sizeof offer) +
         (status.ok() ? network : status.message.substr(0, 4000));
}

Offer Decode(const std::string& bytes, std::string* rest) {
  Offer offer;
  if (bytes.size() < sizeof offer) return offer;
  std::memcpy(&offer, bytes.data(), sizeof offer);
  *rest = bytes.substr(sizeof offer);
  return offer;
}

// Each part has its length before it.
void Append(const std::string& part, std::string* bytes) {
  const auto length = static_cast<uint32_t>(part.size());
  bytes->append(reinterpret_cast<const char*>(&length), sizeof length);
  *bytes += part;
}

// Takes the next part; an empty one if there is none, or it is cut off.
std::string TakePart(std::string* bytes) {
  uint32_t length = 0;
  if (bytes->size() < sizeof length) return "";
  std::memcpy(&length, bytes->data(), sizeof length);
  std::string part = bytes->substr(sizeof length, length);
  bytes->erase(0, sizeof length + part.size());
  return part.size() == length ? part : "";
}

// Returns the first error of any process, or of two that differ.
Status Compare(const PeerGroup& peers, const std::vector<PeerGroup::Contribution>& all,
               uint64_t* number, SharingFailure* failure) {
  Status first;
  int64_t workspace_bytes = 0;
  for (size_t process = 0; process < all.size(); ++process) {
    std::string message;
    const Offer offer = Decode(all[process].bytes, &message);
    *number = std::max(*number, offer.number);
    if (process == 0) workspace_bytes = offer.workspace_bytes;
    if (offer.workspace_bytes != workspace_bytes) {
      *failure = {};
      return FailedPrecondition(
          "jax_ep: ", peers.processes().Describe(0), " needs a workspace of ", workspace_bytes,
          " bytes, and ", peers.processes().Describe(process), " one of ", offer.workspace_bytes,
          ". All processes must run the same programs in the same order");
    }
    failure->out_of_memory |= offer.failure.out_of_memory;
    failure->memory |= offer.failure.memory;
    if (first.ok() && offer.is_ok == 0) {
      first = FailedPrecondition("jax_ep: ", peers.processes().Describe(process),
                                 " reports: ", message);
    }
  }
  return first;
}

// Tries the network before kernels use it. All processes take part.
Status ProbeNetwork(PeerGroup& peers, Generation* generation, const Offer& offer, uint64_t* number,
                    SharingFailure* failure) {
  const GroupProcesses& processes = peers.processes();
  Status status = generation->ProbeNetwork(
      [&](int rank) { return processes.Describe(processes.process_of(size_t(rank))); });
  // Flags are cleared when nobody puts any more, and kernels put when all flags are cleared.
  for (const bool clears : {true, false}) {
    std::vector<PeerGroup::Contribution> all;
    const Status gathered = peers.Gather(PeerGroup::Step::kMapped, Encode(offer, status), {}, &all);
    if (!gathered.ok()) return gathered;
    status = Compare(peers, all, number, failure);
    if (!status.ok() || !clears) return status;
    status = generation->EndProbe();
  }
  return status;
}

}  // namespace

Status ShareGeneration(PeerGroup& peers, const Status& allocated, int64_t workspace_bytes,
                       Generation* generation, uint64_t* number, SharingFailure* failure) {
  Stopwatch stopwatch;
  Offer offer = {.number = *number, .workspace_bytes = workspace_bytes, .failure = *failure};
  std::vector<Generation::Shared> exported;
  Status status = allocated;
  if (status.ok()) {
    status = generation->Export(&exported);
    offer.failure.memory = !status.ok();
  }
  const std::string export_time = stopwatch.Lap();
  std::vector<PeerGroup::Contribution> all;
  std::vector<MemoryHandle> handles;
  std::string network;
  for (Generation::Shared& shared : exported) {
    handles.push_back(std::move(shared.handle));
    Append(shared.offer, &network);
  }
  const Status gathered =
      peers.Gather(PeerGroup::Step::kGeneration, Encode(offer, status, network), handles, &all);
  if (!gathered.ok()) return gathered;
  status = Compare(peers, all, number, failure);
  if (!status.ok()) return status;
  const std::string exchange_time = stopwatch.Lap();

  // The handles and offers of a process are those of its ranks, in order.
  std::vector<Generation::Shared> by_rank(peers.processes().num_ranks());
  std::vector<size_t> used(all.size());
  std::vector<std::string> networks(all.size());
  for (size_t process = 0; process < all.size(); ++process) {
    Decode(all[process].bytes, &networks[process]);
  }
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const size_t process = peers.processes().process_of(rank);
    std::vector<MemoryHandle>& of_process = all[process].handles;
    const size_t next = used[process]++;
    if (next < of_process.size()) by_rank[rank].handle = std::move(of_process[next]);
    by_rank[rank].offer = TakePart(&networks[process]);
  }
  status = generation->Import(*number, by_rank);
  offer.failure.memory = !status.ok();
  const std::string import_time = stopwatch.Lap();
  const Status mapped = peers.Gather(PeerGroup::Step::kMapped, Encode(offer, status), {}, &all);
  Debug("generation ", *number, ": exported in ", export_time, ", all allocated ", exchange_time,
        " later, mapped in ", import_time, ", by all ", stopwatch.Lap(), " later");
  if (!mapped.ok()) return mapped;
  status = Compare(peers, all, number, failure);
  if (status.ok() && generation->has_network()) {
    return ProbeNetwork(peers, generation, offer, number, failure);
  }
  if (!failure->memory) return status;
  // CUDA IPC cannot map the memory of a process that has died, maybe after the step above. Then
  // another step fails, with an error that says so.
  const Status alive = peers.Gather(PeerGroup::Step::kMapped, "", {}, &all);
  return alive.ok() ? status : alive;
}

}  // namespace jax_ep
