// Prints the results of checks, and counts those that failed; a check that all matmuls share.
#ifndef JAX_EP_TESTS_CPP_GPU_MATMUL_REPORT_H_
#define JAX_EP_TESTS_CPP_GPU_MATMUL_REPORT_H_

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace harness {

inline int failures = 0;

inline void Report(bool ok, const std::string& what, const std::string& details) {
  std::printf("%s %s%s%s\n", ok ? "PASS" : "FAIL", what.c_str(), details.empty() ? "" : ": ",
              details.c_str());
  std::fflush(stdout);
  if (!ok) ++failures;
}

// Returns whether launches have the bits of the first one, again and with any number of SMs.
// `first` keeps these for other runners that have the same; `prepare` runs before each launch.
template <typename Runner, typename Prepare>
bool HasSameBits(Runner& runner, std::vector<uint8_t>* first, const Prepare& prepare) {
  bool same = true;
  for (int64_t num_sms : {0, 0, 1, 5, 1000}) {
    runner.SetNumSms(num_sms);
    prepare();
    if (!runner.Launch().ok()) same = false;
    const std::vector<uint8_t> result = runner.Result();
    if (first->empty()) *first = result;
    same = same && result == *first;
  }
  return same;
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MATMUL_REPORT_H_
