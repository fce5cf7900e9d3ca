// Takes the reports that jax_ep.check() raises.
#ifndef JAX_EP_TESTS_CPP_EMULATION_REPORTS_H_
#define JAX_EP_TESTS_CPP_EMULATION_REPORTS_H_

#include <vector>

#include "ffi/runtime/groups/groups.h"

namespace jax_ep::testing {

inline std::vector<TimeoutReport> TakeReports() {
  Groups::OfProcess().PostReports(ProcessMailbox());
  return ProcessMailbox().Take();
}

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_REPORTS_H_
