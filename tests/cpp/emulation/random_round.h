// A round: random programs of one rank group in two lanes. They are executed several times by
// threads as XLA's, with faults, and at last without.
#ifndef JAX_EP_TESTS_CPP_EMULATION_RANDOM_ROUND_H_
#define JAX_EP_TESTS_CPP_EMULATION_RANDOM_ROUND_H_

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "ffi/runtime/groups.h"
#include "tests/cpp/emulation/random_call.h"
#include "tests/cpp/emulation/streams.h"

namespace jax_ep::testing {

inline constexpr int kLanes = 2;

// Changes whenever a thread or a device goes on.
inline std::atomic<int64_t> progress = 0;

struct Counts {
  int64_t rounds = 0, calls = 0, right = 0, ended = 0, aborts = 0, releases = 0;
  static inline std::atomic<int64_t> growths = 0;
};

inline Status StartAndCount(ControlBlock* control, const GenerationState* next,
                            cudaStream_t stream) {
  if (next->rank == 0 && next->workspace_bytes > 0) ++Counts::growths;
  return LaunchStartGeneration(control, next, stream);
}
inline constexpr GroupKernels kRandomKernels = {&LoadTransferKernels, &StartAndCount};

// Happens while programs are executed. Calls may then be ended, with one of these statuses.
struct Fault {
  enum Kind { kNone, kHostAbort, kLaunchFails, kAbsent, kTimeout, kRelease, kTwoStreams };
  Kind kind;
  const char* name;
  std::vector<Outcome> statuses;
};
inline const Fault& FaultOf(Fault::Kind kind) {
  using enum Outcome;
  static const Fault faults[] = {
      {Fault::kNone, "nothing", {}},
      {Fault::kHostAbort, "the host aborts", {kHostAbort}},
      {Fault::kLaunchFails, "a device launches nothing and says so", {kHostAbort, kMismatch}},
      {Fault::kAbsent, "a device makes no more calls", {kHostAbort, kMismatch}},
      {Fault::kTimeout, "a device is too late", {kTimeout}},
      {Fault::kRelease, "release", {kHostAbort, kMismatch, kNoWorkspace}},
      {Fault::kTwoStreams, "two streams of one lane", {kMismatch, kNoWorkspace, kConcurrent}},
  };
  return faults[kind];
}

inline std::atomic<const Fault*> current_fault = &FaultOf(Fault::kNone);

class Round {
 public:
  Round(uint64_t seed, int ranks, Counts* counts)
      : random_(seed), ranks_(ranks), counts_(*counts), devices_(ranks) {
    std::iota(devices_.begin(), devices_.end(), 0);
    shares_lane_ = Uniform(random_, 0, 5) == 0;
    const harness::Options options = {.tiny = ranks > 4 || Uniform(random_, 0, 2) != 0};
    for (int lane = 0; lane < kLanes; ++lane) MakePrograms(lane, options);
    positions_ = std::vector<Position>(kLanes * ranks);
  }

  // Returns whether all was right. Prints what was not.
  bool Run() {
    emulation::settings.seed = random_();
    emulation::settings.resident_blocks = Uniform(random_, 1, 3);
    emulation::settings.num_sms = ranks_ > 16 ? kLanes : 4;  // blocks are threads of this machine
    ++counts_.rounds;
    const int executions = shares_lane_ ? 3 : Uniform(random_, 2, 4);
    for (int i = 1; i <= executions && is_right_; ++i) {
      auto kind = static_cast<Fault::Kind>(Uniform(random_, 0, Fault::kRelease));
      // The first execution makes the workspaces large enough: they do not grow under two streams.
      if (shares_lane_) kind = i == 2 ? Fault::kTwoStreams : Fault::kNone;
      Execute(FaultOf(i == executions ? Fault::kNone : kind));
    }
    Release();
    CheckThat(emulation::AllocatedBytes() < BytesOfAllGroups(), "memory is left after a release");
    return is_right_;
  }

  // Prints where every thread and every device is. Called by the watchdog, beside Run.
  void Describe() const {
    std::printf("executing with the fault: %s\n", current_fault.load()->name);
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int r = 0; r < ranks_; ++r) {
        const Position& position = positions_[lane * ranks_ + r];
        std::printf("lane %d rank %d: the thread %s call %d", lane, r, position.stage.load(),
                    position.call.load());
        if (const ControlBlock* const control = Control(lane, r)) DescribeDevice(*control);
        std::printf("\n");
      }
    }
    std::fflush(stdout);
  }

  // The claims of all control blocks: they change when a call begins and when it ends.
  int64_t Claims() const {
    int64_t sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int r = 0; r < ranks_; ++r) {
        ControlBlock* const control = Control(lane, r);
        if (control != nullptr) sum += std::atomic_ref(control->claim).load();
      }
    }
    return sum;
  }

 private:
  struct Step {
    std::unique_ptr<RandomCall> call;
    std::vector<Status> entered;  // indexed by rank
    std::vector<uint8_t> is_entered, is_launched;
  };
  struct Program {
    std::vector<Step> steps;
    int64_t run = 0;
  };
  // Where the thread of one device and lane is.
  struct Position {
    std::atomic<int> call = 0;
    std::atomic<const char*> stage = "is before";
    Position() = default;
    Position(const Position&) {}
  };

  void MakePrograms(int lane, const harness::Options& options) {
    const int64_t lane_of_calls = shares_lane_ ? 0 : lane;
    for (int programs = Uniform(random_, 1, 4); programs > 0; --programs) {
      Program program;
      std::vector<RandomDispatch*> dispatches;
      for (int calls = Uniform(random_, 1, 4); calls > 0; --calls) {
        std::unique_ptr<RandomCall> call;
        const int kind = dispatches.empty() ? 0 : Uniform(random_, 0, 2);
        if (kind == 0) {
          Shape shape = harness::RandomShape(random_, ranks_, options);
          shape.counts_arrivals = false;
          auto dispatch = std::make_unique<RandomDispatch>(shape, lane_of_calls, kRandomKernels);
          dispatches.push_back(dispatch.get());
          call = std::move(dispatch);
        } else {
          RandomDispatch* const dispatch = dispatches[random_() % dispatches.size()];
          Shape shape = harness::Varied(random_, dispatch->shape, options);
          shape.routing = dispatch->shape.routing;
          shape.counts_arrivals = false;
          if (kind == 1) {
            call =
                std::make_unique<RandomRedispatch>(shape, dispatch, lane_of_calls, kRandomKernels);
          } else {
            call = std::make_unique<RandomCombine>(shape, dispatch, lane_of_calls, kRandomKernels);
          }
        }
        program.steps.push_back({.call = std::move(call)});
      }
      lanes_[lane].push_back(std::move(program));
    }
  }

  // Frees everything and forgets failures.
  void Release() {
    emulation::faults = {};
    Groups::OfProcess().Release();
    ProcessMailbox().Take();
    ++counts_.releases;
    ++progress;
  }

  void Restart(const Fault& fault) {
    const auto set = [](const char* name, const std::string& value) {
      setenv(name, value.c_str(), 1);
    };
    const char* const deadline = fault.kind == Fault::kTimeout ? "0.1" : "1e6";
    set("JAX_EP_ENTRY_TIMEOUT_S", deadline);
    set("JAX_EP_PROGRESS_TIMEOUT_S", deadline);
    // A release and the end of the process end calls that wait for longer.
    const bool warns = fault.kind == Fault::kAbsent || fault.kind == Fault::kRelease;
    set("JAX_EP_WARN_AFTER_S", warns ? "1" : "1e6");
    set("JAX_EP_TEST_DELAY_US", Uniform(random_, 0, 2) == 0 ? "30" : "");
    Release();
  }

  void Execute(const Fault& fault) {
    current_fault = &fault;
    const bool needs_settings = fault.kind != Fault::kNone && fault.kind != Fault::kTwoStreams;
    const bool restarts = Uniform(random_, 0, 2) == 0 && !shares_lane_;
    if (needs_restart_ || needs_settings || restarts) Restart(fault);
    needs_restart_ = fault.kind != Fault::kNone;
    for (auto& lane : lanes_) {
      for (Program& program : lane) {
        program.run = NextRun();
        for (Step& step : program.steps) {
          step.call->Fill(random_);
          step.entered.assign(ranks_, {});
          step.is_entered.assign(ranks_, 0);
          step.is_launched.assign(ranks_, 0);
        }
      }
    }
    // A device that is late, or that does not come.
    odd_rank_ = Uniform(random_, 0, ranks_ - 1);
    odd_program_ = Uniform(random_, 0, 3);
    odd_microseconds_ = Uniform(random_, 0, 2) == 0 ? Uniform(random_, 0, 20'000) : 0;
    if (fault.kind == Fault::kTimeout) odd_microseconds_ = Uniform(random_, 0, 50'000);
    if (fault.kind == Fault::kLaunchFails) emulation::faults.unlaunchable_device = odd_rank_;
    aborted_lanes_.clear();
    const uint64_t seed = random_();
    {
      std::vector<std::jthread> threads;
      for (int lane = 0; lane < kLanes; ++lane) {
        for (int r = 0; r < ranks_; ++r) {
          threads.emplace_back([=, this, &fault] { RunPrograms(lane, r, fault, seed); });
        }
        if (shares_lane_ && fault.kind == Fault::kNone) {  // one after the other
          threads.clear();
          Synchronize();
        }
      }
      Disturb(fault);
    }
    if (fault.kind == Fault::kAbsent) {
      Groups::OfProcess().Drain(Uniform(random_, 0, 1) * 0.05, "a device is absent");
    }
    Synchronize();
    emulation::faults = {};
    Check(fault);
  }

  // Returns what control blocks, states and inboxes of all groups may take. A workspace is larger.
  int64_t BytesOfAllGroups() {
    static std::set<int> sizes;
    sizes.insert(ranks_);
    const int64_t ranks = std::accumulate(sizes.begin(), sizes.end(), 0) * kLanes;
    return ranks * int64_t{sizeof(ControlBlock) + sizeof(GenerationState) + sizeof(Inbox) + 4096};
  }

  // The thread of one device and lane.
  void RunPrograms(int lane, int r, const Fault& fault, uint64_t seed) {
    Random random(seed + lane * ranks_ + r);
    Position& position = positions_[lane * ranks_ + r];
    position.call = 0;
    const cudaStream_t stream = StreamOf(r, lane);
    cudaSetDevice(r);
    for (size_t p = 0; p < lanes_[lane].size(); ++p) {
      Program& program = lanes_[lane][p];
      const bool is_odd = r == odd_rank_ && static_cast<int>(p) >= odd_program_;
      if (r == odd_rank_ && static_cast<int>(p) == odd_program_) Sleep(odd_microseconds_);
      const int first = position.call;
      bool is_ok = true;
      for (Step& step : program.steps) {
        Pause(random);
        position.stage = "enters";
        step.entered[r] =
            step.call->site.Enter(program.run, {r, stream, r, step.call->workspace_bytes(), {}});
        step.is_entered[r] = 1;
        is_ok = is_ok && step.entered[r].ok();
        ++position.call;
        ++progress;
        if (!is_ok) break;
      }
      position.call = first;
      for (Step& step : program.steps) {
        if (!is_ok || (is_odd && fault.kind == Fault::kAbsent)) break;
        Pause(random);
        position.stage = "launches";
        const Status status = step.call->Launch(r, step.call->site.control(r), stream);
        ++progress;
        if (!status.ok()) {  // as the handlers do
          step.call->site.Abort(r, status.message);
          break;
        }
        step.is_launched[r] = 1;
        ++position.call;
      }
      position.call = first + static_cast<int>(program.steps.size());
    }
    position.stage = "has ended before";
  }

  // The main thread's part, while the others run.
  void Disturb(const Fault& fault) {
    if (fault.kind == Fault::kHostAbort) {
      Sleep(Uniform(random_, 0, 30'000));
      for (int lane = 0; lane < kLanes; ++lane) {
        if (GroupOf(lane)->HasRoom(0)) aborted_lanes_.push_back(lane);
      }
      Groups::OfProcess().Abort(GroupOf(0), "a random abort");
      ++counts_.aborts;
    }
    if (fault.kind == Fault::kLaunchFails) ++counts_.aborts;
    if (fault.kind == Fault::kRelease) {
      for (int times = Uniform(random_, 1, 3); times > 0; --times) {
        Sleep(Uniform(random_, 0, 20'000));
        Groups::OfProcess().Release();
        ++counts_.releases;
        ++progress;
      }
    }
  }

  void Check(const Fault& fault) {
    for (int lane = 0; lane < kLanes; ++lane) {
      bool has_ended = false;
      int number = 0;
      for (Program& program : lanes_[lane]) {
        for (Step& step : program.steps) {
          has_ended |= CheckStep(fault, step, Concatenate("lane ", lane, " call ", number++));
        }
      }
      // Nobody computes with safe values without being told.
      if (has_ended && fault.kind != Fault::kRelease && GroupOf(lane)->Failure().ok()) {
        CheckThat(false,
                  Concatenate("a call of lane ", lane, " was ended, and the next one is not told"));
        Describe();
      }
    }
    for (int lane : aborted_lanes_) {
      CheckThat(!GroupOf(lane)->Failure().ok(),
                Concatenate("lane ", lane, " goes on after the host's abort"));
    }
    if (!is_right_) std::printf("the fault was: %s\n", fault.name);
    ++progress;
  }

  // Returns whether a result has the safe values of a failed call.
  bool CheckStep(const Fault& fault, const Step& step, const std::string& name) {
    bool all_right = true, has_ended = false;
    for (int r = 0; r < ranks_; ++r) {
      const auto check = [&](bool condition, const std::string& text) {
        CheckThat(condition, Concatenate(name, " (", kOperations[int(step.call->operation)],
                                         ") rank ", r, ": ", text));
      };
      check(step.entered[r].message == step.entered[0].message &&
                step.is_entered[r] == step.is_entered[0],
            Concatenate("enters with \"", step.entered[r].message, "\", rank 0 with \"",
                        step.entered[0].message, "\""));
      if (fault.kind == Fault::kNone) {
        check(step.is_launched[r], Concatenate("was not launched: ", step.entered[r].message));
      }
      if (!step.is_launched[r]) {
        all_right = false;
        continue;
      }
      std::string why;
      const Verdict verdict = step.call->Check(r, &why);
      check(verdict != Verdict::kWrong, why);
      if (verdict != Verdict::kEnded) continue;
      all_right = false;
      has_ended = true;
      check(fault.kind != Fault::kNone, "was ended, and nothing has failed");
      if (step.call->operation != Operation::kDispatch) continue;
      const int status = static_cast<const RandomDispatch&>(*step.call).status(r);
      const auto allowed = static_cast<Outcome>(status);
      check(
          std::find(fault.statuses.begin(), fault.statuses.end(), allowed) != fault.statuses.end(),
          Concatenate("was ended with status ", status));
    }
    ++counts_.calls;
    ++(all_right ? counts_.right : counts_.ended);
    return has_ended;
  }

  static void DescribeDevice(const ControlBlock& control) {
    const uint64_t claim = control.claim;
    const uint64_t sequence = FirstSequence(control.generation) + (claim >> kClaimShift);
    std::printf("; generation %lu, %lu calls completed, tag %lx, abort %u", control.generation,
                claim >> kClaimShift, claim & (kClaimTags | kClaimOfHost), control.inbox->abort);
    if ((claim & kClaimTags) == 0) return;
    for (int peer = 0; peer < control.num_ranks; ++peer) {
      if (peer == control.rank) continue;
      if (control.inbox->entry[sequence % 2][peer].sequence >= sequence) continue;
      std::printf(", waits for rank %d", peer);
    }
  }

  void CheckThat(bool condition, const std::string& text) {
    if (condition) return;
    std::printf("FAIL %s\n", text.c_str());
    is_right_ = false;
  }

  void Synchronize() {
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int r = 0; r < ranks_; ++r) {
        cudaStreamSynchronize(StreamOf(r, lane));
        ++progress;
      }
    }
  }

  Group* GroupOf(int lane) const {
    return Groups::OfProcess().Find(devices_, shares_lane_ ? 0 : lane, kRandomKernels);
  }

  // Null before it is allocated.
  ControlBlock* Control(int lane, int r) const {
    Group* const group = GroupOf(lane);
    return group->HasRoom(0) ? group->control(r) : nullptr;
  }

  static void Sleep(int microseconds) {
    if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
  }
  static void Pause(Random& random) {
    if (Uniform(random, 0, 3) == 0) Sleep(Uniform(random, 0, 300));
  }

  static constexpr const char* kOperations[] = {"dispatch", "redispatch", "combine"};

  Random random_;
  const int ranks_;
  Counts& counts_;
  std::vector<int> devices_;
  bool shares_lane_ = false;  // both threads of a device call in lane 0
  std::vector<Program> lanes_[kLanes];
  std::vector<Position> positions_;
  bool needs_restart_ = true;
  bool is_right_ = true;
  int odd_rank_ = 0, odd_program_ = 0, odd_microseconds_ = 0;
  std::vector<int> aborted_lanes_;
};

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_RANDOM_ROUND_H_
