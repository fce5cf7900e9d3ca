// Prints the results of checks, and counts those that failed.
#ifndef JAX_EP_TESTS_CPP_GPU_MATMUL_REPORT_H_
#define JAX_EP_TESTS_CPP_GPU_MATMUL_REPORT_H_

#include <cstdio>
#include <string>

namespace harness {

inline int failures = 0;

inline void Report(bool ok, const std::string& what, const std::string& details) {
  std::printf("%s %s%s%s\n", ok ? "PASS" : "FAIL", what.c_str(), details.empty() ? "" : ": ",
              details.c_str());
  std::fflush(stdout);
  if (!ok) ++failures;
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MATMUL_REPORT_H_
