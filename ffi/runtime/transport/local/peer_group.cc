#include "ffi/runtime/transport/local/peer_group.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "ffi/runtime/settings.h"

namespace jax_ep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kTurnOfRelease = ~uint64_t{0};

// A process may release after a failure that a third one still has to tell.
constexpr std::chrono::seconds kInFlight{1};

const char* Name(PeerGroup::Step step) {
  switch (step) {
    case PeerGroup::Step::kCall:
      return "the first run of a call";
    case PeerGroup::Step::kGeneration:
      return "the allocation of a workspace";
    case PeerGroup::Step::kMapped:
      return "the mapping of a workspace";
    case PeerGroup::Step::kUnmapped:
      return "the freeing of a workspace";
    case PeerGroup::Step::kRelease:
      return "jax_ep.release()";
    case PeerGroup::Step::kNetwork:
      return "the start of the network";
  }
  return "?";
}

}  // namespace

PeerGroup::PeerGroup(uint64_t key, const std::vector<Identity>& ranks)
    : key_(key), processes_(ranks) {}

Status PeerGroup::Connect(int64_t domain_size) {
  if (Status status = processes_.CheckHosts(domain_size); !status.ok()) return status;
  Status status = processes_.Connect();
  if (!status.ok()) ReportFailure(era(), status.message);
  return status;
}

void PeerGroup::Start(OnFailure on_failure) {
  on_failure_ = std::move(on_failure);
  Connections::OfProcess().Subscribe(key_, this);
}

Status PeerGroup::Gather(Step step, const std::string& bytes,
                         const std::vector<MemoryHandle>& handles,
                         std::vector<Contribution>* contributions) {
  const std::lock_guard gathering(gathering_);
  Turn turn;
  {
    const std::lock_guard lock(mutex_);
    if (!death_.ok()) return death_;
    if (step != Step::kRelease && !failure_.ok()) return failure_;
    turn = {era_, step == Step::kRelease ? kTurnOfRelease : ++turn_};
  }
  const Frame::Header header = {.kind = Frame::Kind::kStep,
                                .step = static_cast<uint32_t>(step),
                                .group = key_,
                                .era = turn.first,
                                .turn = turn.second};
  std::vector<int> descriptors;
  for (const MemoryHandle& handle : handles) descriptors.push_back(handle.descriptor.get());
  Status status = processes_.Send(header, bytes, descriptors, Name(step));
  if (status.ok()) status = Await(step, turn);
  if (!status.ok()) return step == Step::kRelease ? status : Fail(std::move(status));
  const std::lock_guard lock(mutex_);
  contributions->clear();
  contributions->resize(processes_.size());
  (*contributions)[processes_.self()].bytes = bytes;
  for (auto& [process, frame] : frames_[turn]) {
    Contribution& contribution = (*contributions)[process];
    contribution.bytes = std::move(frame.bytes);
    for (UniqueFd& descriptor : frame.descriptors) {
      contribution.handles.push_back({std::move(descriptor)});
    }
  }
  frames_.erase(turn);
  if (step == Step::kRelease) BeginEra();
  return {};
}

// Called with the lock.
bool PeerGroup::HasArrived(const Turn& turn) const {
  const auto found = frames_.find(turn);
  return found != frames_.end() && found->second.size() + 1 == processes_.size();
}

// Called with the lock. Names the processes that have not made the step.
std::string PeerGroup::Missing(const Turn& turn) const {
  const auto found = frames_.find(turn);
  std::string missing;
  for (size_t process = 0; process < processes_.size(); ++process) {
    if (process == processes_.self()) continue;
    if (found != frames_.end() && found->second.contains(process)) continue;
    missing += Concatenate(missing.empty() ? "" : ", ", processes_.Describe(process));
  }
  return missing;
}

Status PeerGroup::Await(Step step, const Turn& turn) {
  Settings settings;
  if (Status status = ReadSettings(&settings); !status.ok()) return status;
  const auto start = Clock::now();
  auto warning = start + std::chrono::nanoseconds(settings.warning_ns);
  const auto deadline = start + std::chrono::nanoseconds(settings.entry_deadline_ns);
  auto mismatch_deadline = Clock::time_point::max();
  std::unique_lock lock(mutex_);
  while (!HasArrived(turn)) {
    if (!death_.ok()) return death_;
    if (step != Step::kRelease) {
      if (!failure_.ok()) return failure_;
      if (Status status = CheckReleases(step, turn); !status.ok()) {
        mismatch_deadline = std::min(mismatch_deadline, Clock::now() + kInFlight);
        if (Clock::now() >= mismatch_deadline) return status;
      }
    }
    for (const auto& [process, description] : departed_) {
      if (!frames_[turn].contains(process)) {
        return FailedPrecondition("jax_ep: ", processes_.DescribeSelf(), " waits for ", Name(step),
                                  ", but ", description, " has exited");
      }
    }
    if (Clock::now() >= deadline) {
      return FailedPrecondition("jax_ep: ", processes_.DescribeSelf(), " has waited ",
                                static_cast<double>(settings.entry_deadline_ns) * 1e-9, " s for ",
                                Missing(turn), " in ", Name(step),
                                " (JAX_EP_ENTRY_TIMEOUT_S). All processes must run the same "
                                "program, and call jax_ep.release() together");
    }
    if (Clock::now() >= warning) {
      warning = deadline;
      std::fprintf(stderr,
                   "jax_ep: %s has waited %g s for %s in %s and goes on waiting. Is it still "
                   "compiling, or does it run another program?\n",
                   processes_.DescribeSelf().c_str(),
                   static_cast<double>(settings.warning_ns) * 1e-9, Missing(turn).c_str(),
                   Name(step));
    }
    changed_.wait_until(lock, std::min({warning, deadline, mismatch_deadline}));
  }
  return CheckSteps(step, turn);
}

// Called with the lock. Checks that all processes have made the same step.
Status PeerGroup::CheckSteps(Step step, const Turn& turn) const {
  for (const auto& [process, frame] : frames_.at(turn)) {
    const Step other = static_cast<Step>(frame.header.step);
    if (other != step) return OtherStep(step, process, other);
  }
  return {};
}

// Called with the lock. A process that has begun a release makes no step before it any more.
Status PeerGroup::CheckReleases(Step step, const Turn& turn) const {
  const auto released = frames_.find({turn.first, kTurnOfRelease});
  if (released == frames_.end()) return {};
  const auto arrived = frames_.find(turn);
  for (const auto& [process, frame] : released->second) {
    if (arrived != frames_.end() && arrived->second.contains(process)) continue;
    return OtherStep(step, process, Step::kRelease);
  }
  return {};
}

Status PeerGroup::OtherStep(Step step, size_t process, Step other) const {
  return FailedPrecondition("jax_ep: ", processes_.DescribeSelf(), " is in ", Name(step),
                            ", while ", processes_.Describe(process), " is in ", Name(other),
                            ". All processes must run the same programs in the same order");
}

Status PeerGroup::Fail(Status status) {
  ReportFailure(era(), status.message);
  on_failure_(status.message, false);
  return status;
}

Status PeerGroup::AgreeOnCall(const std::string& call, uint64_t* id) {
  // A process that has seen fewer calls takes the others' number.
  const auto number_of = [](const std::string& bytes) {
    return std::strtoull(bytes.c_str(), nullptr, 10);
  };
  const auto call_of = [](const std::string& bytes) { return bytes.substr(bytes.find(' ') + 1); };
  uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = num_calls_ + 1;
  }
  std::vector<Contribution> all;
  Status status = Gather(Step::kCall, Concatenate(number, " ", call), {}, &all);
  if (!status.ok()) return status;
  for (size_t process = 0; process < all.size(); ++process) {
    number = std::max<uint64_t>(number, number_of(all[process].bytes));
    if (call_of(all[process].bytes) == call_of(all[0].bytes)) continue;
    return Fail(FailedPrecondition("jax_ep: ", processes_.Describe(0), " runs ",
                                   call_of(all[0].bytes), ", while ", processes_.Describe(process),
                                   " runs ", call_of(all[process].bytes),
                                   ". All processes must run the same programs in the same order"));
  }
  const std::lock_guard lock(mutex_);
  *id = num_calls_ = number;
  return {};
}

uint64_t PeerGroup::era() const {
  const std::lock_guard lock(mutex_);
  return era_;
}

void PeerGroup::ReportFailure(uint64_t era, const std::string& reason) {
  const Frame::Header header = {.kind = Frame::Kind::kFailure, .group = key_, .era = era};
  {
    const std::lock_guard lock(mutex_);
    if (era != era_ || std::exchange(is_reported_, true)) return;
    if (failure_.ok()) failure_ = FailedPrecondition(reason);
    changed_.notify_all();
  }
  static_cast<void>(processes_.Send(header, reason.substr(0, 8000), {}, "a failure"));
}

Status PeerGroup::Failure() const {
  const std::lock_guard lock(mutex_);
  return death_.ok() ? failure_ : death_;
}

std::string PeerGroup::Departed() const {
  const std::lock_guard lock(mutex_);
  return departed_.empty() ? "" : departed_.begin()->second;
}

// Called with the lock.
void PeerGroup::BeginEra() {
  ++era_;
  turn_ = 0;
  is_reported_ = false;
  failure_ = {};
  frames_.erase(frames_.begin(), frames_.lower_bound({era_, 0}));
  // A process that was faster may have failed again.
  const auto later = later_failures_.find(era_);
  if (later != later_failures_.end()) failure_ = FailedPrecondition(later->second);
}

void PeerGroup::OnFrame(uint64_t process, Frame frame) {
  const size_t index = processes_.IndexOf(process);
  if (index == processes_.size()) return;
  std::string failure;
  {
    const std::lock_guard lock(mutex_);
    const Frame::Header header = frame.header;
    if (header.era < era_) return;  // from before a release
    if (header.kind == Frame::Kind::kStep) {
      frames_[{header.era, header.turn}][index] = std::move(frame);
    } else if (header.era > era_) {
      later_failures_[header.era] = frame.bytes;
    } else if (failure_.ok()) {
      failure = frame.bytes;
      failure_ = FailedPrecondition(failure);
      is_reported_ = true;  // to all, by that process
    }
    changed_.notify_all();
  }
  if (!failure.empty()) on_failure_(failure, false);
}

void PeerGroup::OnEnd(uint64_t process, const Status& end) {
  const size_t index = processes_.IndexOf(process);
  if (index == processes_.size() || index == processes_.self()) return;
  Status death;
  {
    const std::lock_guard lock(mutex_);
    if (end.ok()) {
      departed_[index] = processes_.Describe(index);
    } else if (death_.ok()) {
      death_ = FailedPrecondition("jax_ep: ", processes_.Describe(index), " ", end.message,
                                  ". Look at its log, and start all processes again");
      if (failure_.ok()) failure_ = death_;
      death = death_;
    }
    changed_.notify_all();
  }
  if (!death.ok()) on_failure_(death.message, true);
}

}  // namespace jax_ep
