// Checks a random call: its results, and whether a fault explains them.
#ifndef JAX_EP_TESTS_CPP_EMULATION_RUNTIME_RANDOM_CHECK_H_
#define JAX_EP_TESTS_CPP_EMULATION_RUNTIME_RANDOM_CHECK_H_

#include <algorithm>
#include <cstdio>
#include <string>

#include "tests/cpp/emulation/runtime/random_fault.h"
#include "tests/cpp/emulation/runtime/random_program.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep::testing {

// Counts a failure, and says what it is.
inline void CheckThat(bool condition, const std::string& text) {
  if (condition) return;
  std::printf("FAIL %s\n", text.c_str());
  ++failures;
}

// Returns whether a result has the safe values of a failed call.
inline bool CheckStep(const Fault& fault, const Step& step, const std::string& name,
                      Counts* counts) {
  static constexpr const char* kOperations[] = {"dispatch", "redispatch", "combine"};
  bool all_right = true, has_ended = false;
  for (int r = 0; r < step.call->ranks(); ++r) {
    const auto check = [&](bool condition, const std::string& text) {
      CheckThat(condition, Concatenate(name, " (", kOperations[int(step.call->operation)],
                                       ") rank ", r, ": ", text));
    };
    check(step.entered[r].message == step.entered[0].message &&
              step.is_entered[r] == step.is_entered[0],
          Concatenate("enters with \"", step.entered[r].message, "\", rank 0 with \"",
                      step.entered[0].message, "\""));
    if (fault.kind == Fault::kNone) {
      check(step.is_launched[r], Concatenate("was not launched: ", step.entered[r].message));
    }
    if (!step.is_launched[r]) {
      all_right = false;
      continue;
    }
    std::string why;
    const Verdict verdict = step.call->Check(r, &why);
    check(verdict != Verdict::kWrong, why);
    if (verdict != Verdict::kEnded) continue;
    all_right = false;
    has_ended = true;
    check(fault.kind != Fault::kNone, "was ended, and nothing has failed");
    if (step.call->operation != Operation::kDispatch) continue;
    const int status = static_cast<const RandomDispatch&>(*step.call).status(r);
    const auto allowed = static_cast<Outcome>(status);
    check(std::find(fault.statuses.begin(), fault.statuses.end(), allowed) != fault.statuses.end(),
          Concatenate("was ended with status ", status));
  }
  ++counts->calls;
  ++(all_right ? counts->right : counts->ended);
  return has_ended;
}

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_RUNTIME_RANDOM_CHECK_H_
