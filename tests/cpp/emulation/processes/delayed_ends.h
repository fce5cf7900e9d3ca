// Keeps a process from learning that another one has ended.
#ifndef JAX_EP_TESTS_CPP_EMULATION_PROCESSES_DELAYED_ENDS_H_
#define JAX_EP_TESTS_CPP_EMULATION_PROCESSES_DELAYED_ENDS_H_

#include <atomic>
#include <chrono>
#include <thread>

#include "ffi/runtime/transport/local/connections.h"

namespace jax_ep::testing {

// Made before the process's groups. Never destroyed: the thread of the connections calls it.
class DelayedEnds : public Connections::Receiver {
 public:
  // Group 0 is told before all others.
  DelayedEnds() { Connections::OfProcess().Subscribe(0, this); }

  // Lets the process learn of ends a while later.
  void Tell() { may_tell_ = true; }

  void OnFrame(uint64_t, Frame) override {}
  void OnEnd(uint64_t, const Status&) override {
    while (!may_tell_) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }

 private:
  std::atomic<bool> may_tell_ = false;
};

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_PROCESSES_DELAYED_ENDS_H_
