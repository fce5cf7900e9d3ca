#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "ffi/runtime/debug.h"
#include "ffi/runtime/groups/share_generation.h"

namespace jax_ep {
namespace {

// A process's part of a step, followed by the message of an error.
struct Offer {
  uint64_t number = 0;
  int64_t workspace_bytes = 0;
  uint32_t is_ok = 0;
  SharingFailure failure;
};

std::string Encode(Offer offer, const Status& status) {
  offer.is_ok = status.ok();
  return std::string(reinterpret_cast<const char*>(&offer), sizeof offer) +
         status.message.substr(0, 4000);
}

Offer Decode(const std::string& bytes, std::string* message) {
  Offer offer;
  if (bytes.size() < sizeof offer) return offer;
  std::memcpy(&offer, bytes.data(), sizeof offer);
  *message = bytes.substr(sizeof offer);
  return offer;
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

}  // namespace

Status ShareGeneration(PeerGroup& peers, const Status& allocated, int64_t workspace_bytes,
                       Generation* generation, uint64_t* number, SharingFailure* failure) {
  Stopwatch stopwatch;
  Offer offer = {.number = *number, .workspace_bytes = workspace_bytes, .failure = *failure};
  std::vector<MemoryHandle> exported;
  Status status = allocated;
  if (status.ok()) {
    status = generation->Export(&exported);
    offer.failure.memory = !status.ok();
  }
  const std::string export_time = stopwatch.Lap();
  std::vector<PeerGroup::Contribution> all;
  const Status gathered =
      peers.Gather(PeerGroup::Step::kGeneration, Encode(offer, status), exported, &all);
  if (!gathered.ok()) return gathered;
  status = Compare(peers, all, number, failure);
  if (!status.ok()) return status;
  const std::string exchange_time = stopwatch.Lap();

  // The handles of a process are those of its ranks, in order.
  std::vector<MemoryHandle> by_rank(peers.processes().num_ranks());
  std::vector<size_t> used(all.size());
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const size_t process = peers.processes().process_of(rank);
    std::vector<MemoryHandle>& of_process = all[process].handles;
    const size_t next = used[process]++;
    if (next < of_process.size()) by_rank[rank] = std::move(of_process[next]);
  }
  status = generation->Import(*number, by_rank);
  offer.failure.memory = !status.ok();
  const std::string import_time = stopwatch.Lap();
  const Status mapped = peers.Gather(PeerGroup::Step::kMapped, Encode(offer, status), {}, &all);
  Debug("generation ", *number, ": exported in ", export_time, ", all allocated ", exchange_time,
        " later, mapped in ", import_time, ", by all ", stopwatch.Lap(), " later");
  if (!mapped.ok()) return mapped;
  status = Compare(peers, all, number, failure);
  if (!failure->memory) return status;
  // CUDA IPC cannot map the memory of a process that has died, maybe after the step above. Then
  // another step fails, with an error that says so.
  const Status alive = peers.Gather(PeerGroup::Step::kMapped, "", {}, &all);
  return alive.ok() ? status : alive;
}

}  // namespace jax_ep
