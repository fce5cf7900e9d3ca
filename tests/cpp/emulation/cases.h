// The cases of a test program, each of which is timed.
#ifndef JAX_EP_TESTS_CPP_EMULATION_CASES_H_
#define JAX_EP_TESTS_CPP_EMULATION_CASES_H_

#include <chrono>
#include <cstdio>
#include <functional>
#include <string_view>
#include <vector>

#include "tests/cpp/unit/check.h"

namespace jax_ep::testing {

struct Case {
  const char* name;
  std::function<void()> run;
};

inline double Seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Runs all cases, or after `--only NAME` those whose names begin so. Returns the exit status for
// main().
inline int RunCases(const std::vector<Case>& cases, int argc, char** argv) {
  std::string_view only;
  for (int i = 1; i + 1 < argc; ++i) {
    if (std::string_view(argv[i]) == "--only") only = argv[i + 1];
  }
  int num_run = 0;
  for (const Case& test : cases) {
    if (!std::string_view(test.name).starts_with(only)) continue;
    ++num_run;
    std::printf("%s: ", test.name);
    std::fflush(stdout);
    const int failures_before = failures;
    const double seconds = Seconds(test.run);
    std::printf("%.1f s%s\n", seconds, failures == failures_before ? "" : ", FAILED");
  }
  CHECK(num_run > 0);
  return Finish();
}

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_CASES_H_
