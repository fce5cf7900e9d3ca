// A kernel that occupies a stream until it is told to end.
#ifndef JAX_EP_TESTS_CPP_EMULATION_OBSTACLE_H_
#define JAX_EP_TESTS_CPP_EMULATION_OBSTACLE_H_

#include <atomic>
#include <chrono>
#include <thread>

#include "cuda_runtime_api.h"
#include "tests/cpp/unit/check.h"

namespace jax_ep::testing {

class Obstacle {
 public:
  // Called by main(), before any kernel is launched.
  static void Register() { emulation::Register(Address(), Wait); }

  explicit Obstacle(cudaStream_t stream) {
    Stage stage = {&is_removed_};
    void* arguments[] = {&stage};
    CHECK(cudaLaunchKernel(Address(), 1, 32, arguments, 0, stream) == cudaSuccess);
  }
  void Remove() { is_removed_ = true; }
  std::jthread RemoveLater() {
    return std::jthread([this] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      Remove();
    });
  }
  bool IsRemoved() const { return is_removed_; }

 private:
  struct Stage {
    const std::atomic<bool>* is_removed;
  };
  static void Wait(Stage stage) {
    while (!*stage.is_removed) emulation::Yield();
  }
  static const void* Address() { return reinterpret_cast<const void*>(Wait); }

  std::atomic<bool> is_removed_ = false;
};

}  // namespace jax_ep::testing

#endif  // JAX_EP_TESTS_CPP_EMULATION_OBSTACLE_H_
