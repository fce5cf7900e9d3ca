// Checks for the C++ unit tests. They go on after a failure, which shows in the exit status.
#ifndef JAX_EP_TESTS_CPP_UNIT_CHECK_H_
#define JAX_EP_TESTS_CPP_UNIT_CHECK_H_

#include <iostream>
#include <string_view>

namespace jax_ep::testing {

inline int failures = 0;

inline void Report(const char* file, int line, const char* what, std::string_view detail = "") {
  ++failures;
  std::cerr << file << ":" << line << ": failed: " << what;
  if (!detail.empty()) std::cerr << "\n  got: " << detail;
  std::cerr << "\n";
}

inline bool Contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

// Returns the exit status for main().
inline int Finish() {
  std::cout << (failures == 0 ? "passed" : "FAILED") << "\n";
  return failures == 0 ? 0 : 1;
}

}  // namespace jax_ep::testing

#define CHECK(condition) \
  if (!(condition)) ::jax_ep::testing::Report(__FILE__, __LINE__, #condition)

// Whether a status is an error whose message contains `part`.
#define CHECK_FAILS(expression, part)                                      \
  if (const auto& status_ = (expression);                                  \
      status_.ok() || !::jax_ep::testing::Contains(status_.message, part)) \
  ::jax_ep::testing::Report(__FILE__, __LINE__, #expression " fails with " #part, status_.message)

#define CHECK_OK(expression)                             \
  if (const auto& status_ = (expression); !status_.ok()) \
  ::jax_ep::testing::Report(__FILE__, __LINE__, #expression " is ok", status_.message)

#endif  // JAX_EP_TESTS_CPP_UNIT_CHECK_H_
