// Faults of a random round, and the statuses that they explain.
#ifndef JAX_EP_TESTS_CPP_EMULATION_RUNTIME_RANDOM_FAULT_H_
#define JAX_EP_TESTS_CPP_EMULATION_RUNTIME_RANDOM_FAULT_H_

#include <atomic>
#include <vector>

#include "ffi/device/protocol/control_block.h"

namespace jax_ep::testing {

// Happens while programs are executed. Calls may then be ended, with one of these statuses.
struct Fault {
  enum Kind { kNone, kHostAbort, kLaunchFails, kAbsent, kTimeout, kRelease, kTwoStreams };
  Kind kind;
  const char* name;
  std::vector<Outcome> statuses;
};
inline const Fault& FaultOf(Fault::Kind kind) {
  using enum Outcome;
  static const Fault faults[] = {
      {Fault::kNone, "nothing", {}},
      {Fault::kHostAbort, "the host aborts", {kHostAbort}},
      {Fault::kLaunchFails, "a device launches nothing and says so", {kHostAbort, kMismatch}},
      {Fault::kAbsent, "a device makes no more calls", {kHostAbort, kMismatch}},
      {Fault::kTimeout, "a device is too late", {kTimeout}},
      {Fault::kRelease, "release", {kHostAbort, kMismatch, kNoWorkspace}},
      {Fault::kTwoStreams, "two streams of one lane", {kMismatch, kNoWorkspace, kConcurrent}},
  };
  return faults[kind];
}

inline std::atomic<const Fault*> current_fault = &FaultOf(Fault::kNone);

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_RUNTIME_RANDOM_FAULT_H_
