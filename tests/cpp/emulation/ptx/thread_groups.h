// Operations that a thread has issued and not yet waited for.
#ifndef JAX_EP_TESTS_CPP_EMULATION_PTX_THREAD_GROUPS_H_
#define JAX_EP_TESTS_CPP_EMULATION_PTX_THREAD_GROUPS_H_

#include <deque>
#include <functional>
#include <utility>
#include <vector>

#include "tests/cpp/emulation/cuda/emulator.h"

namespace jax_ep {

// Returns the running thread's T.
template <typename T>
T& EmulatedOfThread() {
  static thread_local T states[emulation::kMaxFibers];
  return states[emulation::Here().number];
}

// Groups of operations that run when the thread waits for them, at the latest.
struct EmulatedGroups {
  using Group = std::vector<std::function<void()>>;
  Group open;
  std::deque<Group> groups;

  void Commit() { groups.push_back(std::exchange(open, {})); }
  // Runs all groups but the latest `pending`.
  void Run(size_t pending) {
    for (; groups.size() > pending; groups.pop_front()) {
      for (const auto& operation : groups.front()) operation();
    }
  }
};

}  // namespace jax_ep

#endif  // JAX_EP_TESTS_CPP_EMULATION_PTX_THREAD_GROUPS_H_
