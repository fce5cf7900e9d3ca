// A fresh start for each case of the runtime's tests: groups live until the process ends.
#ifndef JAX_EP_TESTS_CPP_EMULATION_RUNTIME_FIXTURE_H_
#define JAX_EP_TESTS_CPP_EMULATION_RUNTIME_FIXTURE_H_

#include <vector>

#include "ffi/runtime/groups/groups.h"
#include "tests/cpp/emulation/cases.h"
#include "tests/cpp/emulation/programs/dispatch_program.h"
#include "tests/cpp/emulation/transfer/register_kernels.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep::testing {

inline constexpr int kSmall = 6, kMedium = 600, kLarge = 6000;  // tokens

// Begins with new generations and no faults.
inline void Restart() {
  emulation::faults = {};
  Groups::OfProcess().Release();
  ProcessMailbox().Take();
}

inline Group* GroupOf(std::vector<int> devices) {
  return Groups::OfProcess().Find(devices, 0, DispatchProgram::kKernels);
}

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_RUNTIME_FIXTURE_H_
