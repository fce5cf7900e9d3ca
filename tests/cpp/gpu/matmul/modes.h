// The modes of a program, one of which its first argument names.
#ifndef JAX_EP_TESTS_CPP_GPU_MATMUL_MODES_H_
#define JAX_EP_TESTS_CPP_GPU_MATMUL_MODES_H_

#include <cstdio>
#include <initializer_list>
#include <string>
#include <string_view>

#include "ffi/kernels/matmul/launch.h"
#include "tests/cpp/gpu/guarded_buffer.h"
#include "tests/cpp/gpu/matmul/report.h"

namespace harness {

struct Mode {
  std::string_view name;  // "small" has exact guards, for compute-sanitizer
  void (*run)();
};

// Runs the named mode, and for "all" those named "check" and "time". Returns the exit status.
inline int RunModes(int argc, char** argv, std::initializer_list<Mode> modes) {
  const std::string wanted = argc > 1 ? argv[1] : "all";
  if (const jax_ep::Status status = jax_ep::LoadMatmulKernels(); !status.ok()) {
    std::printf("FAIL loading: %s\n", status.message.c_str());
    return 1;
  }
  bool is_known = false;
  for (const auto& [name, run] : modes) {
    if (name != wanted && (wanted != "all" || (name != "check" && name != "time"))) continue;
    is_known = true;
    GuardedBuffer::exact = name == "small";
    run();
  }
  if (!is_known) Report(false, "there is no mode " + wanted, "expected one of the program's head");
  std::printf(failures == 0 ? "all passed\n" : "%d failed\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace harness

#endif  // JAX_EP_TESTS_CPP_GPU_MATMUL_MODES_H_
