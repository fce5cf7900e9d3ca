// Random calls of rank groups through call sites, in two lanes, with faults: every result is right
// to the bit, or the call is safely ended and the group works again after a release. Nothing hangs.
//
//   runtime_random [--calls N] [--seconds S] [--seed X] [--ranks N] [--domain-size N]
//                  [--network] [--deadline S] [--progress]
//
//   --calls N      stops after N calls, each of all ranks; default 1000, and any with --seconds
//   --seconds S    stops after S seconds
//   --seed X       of the first round; the next has X + 1. Default: a random one
//   --ranks N      of every round; default: 1 to 16
//   --domain-size N   ranks per NVLink domain, 0 for one level; default: any that divides the ranks
//   --network      joins domains by a network on which puts overtake each other
//   --deadline S   fails if nothing goes on for S seconds; default 120
//   --progress     prints every round
//
// A seed determines programs and faults, but not the order in which the threads run.
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <random>
#include <string_view>

#include "tests/cpp/emulation/runtime/late_networks.h"
#include "tests/cpp/emulation/runtime/random_round.h"
#include "tests/cpp/emulation/transfer/register_kernels.h"

namespace jax_ep::testing {
namespace {

struct Options {
  int64_t calls = 0;
  double seconds = 0;
  uint64_t seed = 0;
  int ranks = 0;
  int domain_size = -1;
  double deadline = 120;
  bool progress = false;
};

Options Parse(int argc, char** argv) {
  Options options;
  options.seed = std::random_device{}() % 1'000'000'000;
  for (int i = 1; i < argc; ++i) {
    const std::string_view name = argv[i];
    const auto value = [&] { return i + 1 < argc ? argv[++i] : ""; };
    if (name == "--calls") {
      options.calls = std::atoll(value());
    } else if (name == "--seconds") {
      options.seconds = std::atof(value());
    } else if (name == "--seed") {
      options.seed = std::strtoull(value(), nullptr, 10);
    } else if (name == "--ranks") {
      options.ranks = std::atoi(value());
    } else if (name == "--domain-size") {
      options.domain_size = std::atoi(value());
    } else if (name == "--network") {
      LateNetworks::Use();
    } else if (name == "--deadline") {
      options.deadline = std::atof(value());
    } else if (name == "--progress") {
      options.progress = true;
    } else {
      std::printf("unknown option %s: the head of runtime_random.cc lists all\n", argv[i]);
      std::exit(2);
    }
  }
  if (options.calls == 0) options.calls = options.seconds > 0 ? INT64_MAX : 1000;
  if (options.seconds == 0) options.seconds = INFINITY;
  return options;
}

// The command that repeats the present round.
char replay[128];

void PrintReplay(uint64_t seed, int ranks, int domain_size) {
  std::snprintf(replay, sizeof replay,
                "FAIL; again: runtime_random --calls 1 --seed %lu --ranks %d --domain-size %d\n",
                seed, ranks, domain_size);
}

// A kernel has accessed memory that is freed.
void OnCrash(int signal) {
  const char* const fault = current_fault.load()->name;
  for (const char* text :
       {"a crash with the fault: ", fault, "\n", static_cast<const char*>(replay)}) {
    static_cast<void>(!write(STDOUT_FILENO, text, std::strlen(text)));
  }
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

// Ends the process if nothing goes on.
class Watchdog {
 public:
  explicit Watchdog(double deadline) : deadline_(deadline) {}

  void Watch(const Round* round) {
    const std::lock_guard lock(mutex_);
    round_ = round;
  }

 private:
  void Run(const std::stop_token& stop) {
    int64_t last = -1;
    auto since = std::chrono::steady_clock::now();
    while (!stop.stop_requested()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      const std::lock_guard lock(mutex_);
      const int64_t now = progress + (round_ != nullptr ? round_->Claims() : 0);
      if (now != last) {
        last = now;
        since = std::chrono::steady_clock::now();
      }
      if (std::chrono::steady_clock::now() - since < std::chrono::duration<double>(deadline_))
        continue;
      std::printf("nothing has gone on for %g s\n", deadline_);
      if (round_ != nullptr) round_->Describe();
      std::printf("%s", replay);
      std::fflush(stdout);
      std::_Exit(1);
    }
  }

  const double deadline_;
  std::mutex mutex_;
  const Round* round_ = nullptr;
  std::jthread thread_{[this](const std::stop_token& stop) { Run(stop); }};
};

// Returns how many ranks a round has. Nine of ten have few: they take less time.
int RanksOf(uint64_t seed) {
  Random random(seed);
  return Uniform(random, 0, 9) == 0 ? Uniform(random, 5, 16) : Uniform(random, 1, 4);
}

int Main(int argc, char** argv) {
  const Options options = Parse(argc, argv);
  RegisterKernels();
  for (int signal : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE}) std::signal(signal, OnCrash);
  Watchdog watchdog(options.deadline);
  Counts counts;
  const double start = harness::Now();
  bool is_right = true;
  uint64_t seed = options.seed;
  std::printf("seed %lu\n", seed);
  for (; is_right && counts.calls < options.calls && harness::Now() - start < options.seconds;
       ++seed) {
    const int ranks = options.ranks > 0 ? options.ranks : RanksOf(seed);
    PrintReplay(seed, ranks, options.domain_size);
    Round round(seed, ranks, options.domain_size, &counts);
    watchdog.Watch(&round);
    is_right = round.Run();
    watchdog.Watch(nullptr);
    if (!is_right) std::printf("%s", replay);
    if (options.progress) {
      std::printf("seed %lu, %d ranks: %ld calls so far, %.1f s\n", seed, ranks, counts.calls,
                  harness::Now() - start);
      std::fflush(stdout);
    }
  }
  std::printf(
      "%s seed %lu: %ld rounds, %ld calls, %ld right, %ld ended, %ld aborts, %ld releases, "
      "%ld growths, %.1f s\n",
      is_right ? "PASS" : "FAIL", options.seed, counts.rounds, counts.calls, counts.right,
      counts.ended, counts.aborts, counts.releases, Counts::growths.load(), harness::Now() - start);
  std::fflush(stdout);
  std::_Exit(is_right ? 0 : 1);  // threads of the runtime go on
}

}  // namespace
}  // namespace jax_ep::testing

int main(int argc, char** argv) { return jax_ep::testing::Main(argc, argv); }
