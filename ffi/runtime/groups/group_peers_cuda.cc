// The part of a group that spans processes: what the processes tell each other.
#include <chrono>
#include <cstdio>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/runtime/debug.h"
#include "ffi/runtime/groups/failure.h"
#include "ffi/runtime/groups/group.h"
#include "ffi/runtime/groups/groups.h"
#include "ffi/runtime/groups/share_generation.h"
#include "ffi/runtime/network/networks.h"

namespace jax_ep {
namespace {

// A process that has exited comes no more: who waits for it waits no longer than this.
constexpr double kWarningSecondsAfterExit = 5;

}  // namespace

void Group::JoinPeers() {
  peers_->Start([this](const std::string& reason, bool has_died) {
    AbortLocal(CauseOf(reason));
    if (!has_died) return;
    std::fprintf(stderr, "%s\n", reason.c_str());
    Groups::OfProcess().EndIfBlocked(reason);
  });
}

// Tries kinds of memory until one works in all processes, which decide by the same failures.
Status Group::AllocateShared(int64_t workspace_bytes, std::unique_ptr<Generation>* next,
                             bool* out_of_memory) {
  Stopwatch stopwatch;
  Status prepared = AllocateOnce();
  if (HasNetwork()) prepared = JoinNetwork(prepared);
  Debug("kernels loaded, control blocks allocated in ", stopwatch.Lap());
  std::string tried;
  for (PeerMemory* const memory : memories_) {
    SharingFailure failure;
    std::unique_ptr<GenerationRails> rails;
    Status status = prepared;
    if (status.ok()) status = MakeRails(&rails);
    ++last_number_;
    if (status.ok()) {
      status = Generation::Allocate(members_, last_number_, workspace_bytes, next,
                                    &failure.out_of_memory, memory, std::move(rails));
      failure.memory = !status.ok() && !failure.out_of_memory;
    }
    Debug("a workspace of ", workspace_bytes, " bytes per rank by ", memory->name(), " in ",
          stopwatch.Lap(), status.ok() ? "" : ": ", status.message);
    status =
        ShareGeneration(*peers_, status, workspace_bytes, next->get(), &last_number_, &failure);
    *out_of_memory = failure.out_of_memory;
    if (status.ok()) {
      memories_ = {memory};
      return {};
    }
    next->reset();
    Debug(memory->name(), " fails: ", status.message);
    if (!failure.memory || failure.out_of_memory || memory == memories_.back()) {
      status.message += tried;
      return status;
    }
    tried += Concatenate(". Before, by ", memory->name(), ": ", CauseOf(status.message));
  }
  return FailedPrecondition("jax_ep: there is no memory that processes share");
}

// Has the network connect the processes, once: some need all of them for that.
Status Group::JoinNetwork(const Status& own) {
  if (has_joined_network_) return own;
  const GroupProcesses& processes = peers_->processes();
  NetworkMembers members;
  members.self = processes.self();
  members.count = processes.size();
  members.devices = local_devices_;
  members.describe = [&](size_t process) { return processes.Describe(process); };
  members.gather = [&](const std::string& bytes, std::vector<std::string>* all) {
    std::vector<PeerGroup::Contribution> contributions;
    Status status = peers_->Gather(PeerGroup::Step::kNetwork, bytes, {}, &contributions);
    all->clear();
    for (PeerGroup::Contribution& of_process : contributions) {
      all->push_back(std::move(of_process.bytes));
    }
    return status;
  };
  Status status = Networks::OfProcess().JoinAll(members, own);
  has_joined_network_ = status.ok();
  return status;
}

// Begins an era in all processes. Sets `has_generation` to whether any of them has one to end.
// Returns false after an error, which the next call reports.
bool Group::AgreeOnRelease(bool* has_generation) {
  std::vector<PeerGroup::Contribution> all;
  const Status status =
      peers_->Gather(PeerGroup::Step::kRelease, *has_generation ? "1" : "0", {}, &all);
  if (!status.ok()) {
    AbortLocal(CauseOf(status.message));
    return false;
  }
  for (const PeerGroup::Contribution& other : all) *has_generation |= other.bytes == "1";
  return true;
}

void Group::TellPeers(uint64_t era, const std::string& reason) {
  peers_->ReportFailure(era, Concatenate("jax_ep: ", peers_->processes().DescribeSelf(),
                                         " reports: ", CauseOf(reason)));
}

void Group::TellFailure(uint64_t era) {
  if (const Status failure = Failure(); !failure.ok()) TellPeers(era, failure.message);
}

// If a rank of another process has ended the calls, the reason may still be in flight.
void Group::AwaitReason(Generation& generation) const {
  if (!generation.Failure().ok() || !generation.IsAborted()) return;
  for (int i = 0; i < 200 && generation.Failure().ok(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (generation.Failure().ok()) generation.Abort("a rank of another process has ended them");
}

void Group::Watch() {
  const uint64_t era = peers_ ? peers_->era() : 0;
  const std::string departed = peers_ ? peers_->Departed() : "";
  for (const auto& generation : All()) {
    generation->PrintWarnings();
    const Status failure = generation->NetworkFailure();
    // A process that exits in order ends its network, too.
    if (!failure.ok() && departed.empty()) Abort(failure.message);
  }
  if (!peers_) return;
  // During a release the era is the next one, and failures are those of the one before.
  if (!is_releasing_) TellFailure(era);
  if (!departed.empty()) {
    ShortenWarnings(kWarningSecondsAfterExit);
    AbortLongWait(Concatenate(departed, " has exited").c_str());
  }
}

}  // namespace jax_ep
