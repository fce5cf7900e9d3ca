// Bandwidth and latency between two processes, for people to read.
#ifndef JAX_EP_TESTS_CPP_EMULATION_PROCESSES_NETWORK_MEASUREMENT_H_
#define JAX_EP_TESTS_CPP_EMULATION_PROCESSES_NETWORK_MEASUREMENT_H_

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "tests/cpp/emulation/processes/network_side.h"

namespace jax_ep::testing {

inline double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Waits for a word, making progress.
inline void AwaitWord(NetworkSide& side, uint64_t place, uint64_t value) {
  while (side.Read(place) != value) {
    if (const Status status = side.network().Progress(); !status.ok()) {
      CHECK_OK(status);
      return;
    }
  }
}

inline void Measure(NetworkSide& side, int rank) {
  constexpr int kPuts = 2000, kRounds = 3000, kInFlight = 16;
  if (rank == 0) std::printf("%s\n", side.network().Describe(0).c_str());
  side.Meet();
  for (int repeat = 0; repeat < 2; ++repeat) {  // the first one warms up
    const auto start = std::chrono::steady_clock::now();
    uint64_t value = 0;
    if (rank == 0) {
      for (int n = 0; n < kPuts; ++n) {
        CHECK_OK(side.PutWords(side.Flag(n % side.kSlots), ++value, side.kSlotBytes));
        CHECK_OK(side.network().Progress());
        if (n % kInFlight == kInFlight - 1) {
          while (!side.network().IsIdle()) CHECK_OK(side.network().Progress());
        }
      }
      const double seconds = SecondsSince(start);
      if (repeat > 0) {
        std::printf("  %d in flight of 256 KiB: %.2f GB/s\n", kInFlight,
                    kPuts * side.kSlotBytes / seconds / 1e9);
      }
    }
    side.Meet();
  }
  for (size_t bytes : {size_t{0}, size_t{8}, side.kSlotBytes}) {
    std::vector<double> times;
    for (uint64_t n = 1; n <= kRounds; ++n) {
      const uint64_t value = bytes * 1'000'000 + n;
      const auto start = std::chrono::steady_clock::now();
      if (rank == 1) AwaitWord(side, side.Credit(0), value);
      CHECK_OK(side.PutWords(side.Credit(0), value, bytes));
      if (rank == 0) AwaitWord(side, side.Credit(0), value);
      times.push_back(SecondsSince(start) / 2 * 1e6);
    }
    if (rank == 0) {
      std::sort(times.begin(), times.end());
      std::printf("  Start to flag seen with %zu bytes: p50 %.1f us, p99 %.1f us\n", bytes,
                  times[kRounds / 2], times[kRounds * 99 / 100]);
      std::fflush(stdout);
    }
    side.Meet();
  }
}

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_PROCESSES_NETWORK_MEASUREMENT_H_
