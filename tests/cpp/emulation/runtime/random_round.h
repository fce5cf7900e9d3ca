// A round: random programs of one rank group in two lanes. They are executed several times by
// threads as XLA's, with faults, and at last without.
#ifndef JAX_EP_TESTS_CPP_EMULATION_RUNTIME_RANDOM_ROUND_H_
#define JAX_EP_TESTS_CPP_EMULATION_RUNTIME_RANDOM_ROUND_H_

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "ffi/runtime/groups/groups.h"
#include "tests/cpp/emulation/runtime/random_check.h"
#include "tests/cpp/emulation/runtime/random_fault.h"
#include "tests/cpp/emulation/runtime/random_position.h"
#include "tests/cpp/emulation/runtime/random_program.h"
#include "tests/cpp/emulation/streams.h"

namespace jax_ep::testing {

inline constexpr int kLanes = 2;

// Changes whenever a thread or a device goes on.
inline std::atomic<int64_t> progress = 0;

class Round {
 public:
  // With a domain size below 0 a random one is used.
  Round(uint64_t seed, int ranks, int domain_size, Counts* counts)
      : random_(seed), ranks_(ranks), counts_(*counts), devices_(ranks) {
    std::iota(devices_.begin(), devices_.end(), 0);
    shares_lane_ = Uniform(random_, 0, 5) == 0;
    domain_size_ = domain_size >= 0 ? domain_size : harness::RandomDomainSize(random_, ranks);
    const harness::Options options = {.domain_size = domain_size_,
                                      .rail_slots = RailSlots(),
                                      .tiny = ranks > 4 || Uniform(random_, 0, 2) != 0};
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes_[lane] = RandomPrograms(random_, ranks, shares_lane_ ? 0 : lane, options);
    }
    positions_ = std::vector<Position>(kLanes * ranks);
  }

  // Returns the bound of the rings, which a network knows none of.
  int64_t RailSlots() {
    const int64_t slots = harness::Pick(random_, {0, 2, 2, 4});
    return Networks::OfProcess().are_used() ? 0 : slots;
  }

  // Returns whether all was right. Prints what was not.
  bool Run() {
    emulation::settings.seed = random_();
    emulation::settings.resident_blocks = Uniform(random_, 1, 3);
    emulation::settings.num_sms = ranks_ > 16 ? kLanes : 4;  // blocks are threads of this machine
    ++counts_.rounds;
    const int executions = shares_lane_ ? 3 : Uniform(random_, 2, 4);
    for (int i = 1; i <= executions && failures == 0; ++i) {
      auto kind = static_cast<Fault::Kind>(Uniform(random_, 0, Fault::kRelease));
      // The first execution makes the workspaces large enough: they do not grow under two streams.
      if (shares_lane_) kind = i == 2 ? Fault::kTwoStreams : Fault::kNone;
      Execute(FaultOf(i == executions ? Fault::kNone : kind));
    }
    Release();
    CheckThat(emulation::AllocatedBytes() < BytesOfAllGroups(), "memory is left after a release");
    return failures == 0;
  }

  // Prints where every thread and every device is. Called by the watchdog, beside Run.
  void Describe() const {
    std::printf("domains of %d, executing with the fault: %s\n", domain_size_,
                current_fault.load()->name);
    for (int lane = 0; lane < kLanes; ++lane) {
      for (int r = 0; r < ranks_; ++r) {
        const Position& position = positions_[lane * ranks_ + r];
        std::printf("lane %d rank %d: the thread %s call %d", lane, r, position.stage.load(),
                    position.call.load());
        if (ControlBlock* const control = Control(lane, r)) DescribeDevice(*control);
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
    static std::set<std::pair<int, int>> groups;
    groups.insert({ranks_, domain_size_});
    int64_t ranks = 0;
    for (const auto& [num_ranks, domain_size] : groups) ranks += num_ranks * kLanes;
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
          has_ended |=
              CheckStep(fault, step, Concatenate("lane ", lane, " call ", number++), &counts_);
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
    if (failures > 0) std::printf("the fault was: %s\n", fault.name);
    ++progress;
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
    return Groups::OfProcess().Find(devices_, shares_lane_ ? 0 : lane, kRandomKernels,
                                    domain_size_);
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

  Random random_;
  const int ranks_;
  int domain_size_ = 0;
  Counts& counts_;
  std::vector<int> devices_;
  bool shares_lane_ = false;  // both threads of a device call in lane 0
  std::vector<Program> lanes_[kLanes];
  std::vector<Position> positions_;
  bool needs_restart_ = true;
  int odd_rank_ = 0, odd_program_ = 0, odd_microseconds_ = 0;
  std::vector<int> aborted_lanes_;
};

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_RUNTIME_RANDOM_ROUND_H_
